"""slowing_down: steps take longer and longer over the run.

Compares steady steps in the last third of the run with those in the first third. Noise is ruled out by the interval of
either median. Waits for CPU cores or other ranks, and pauses such as validation, do not count. The share is the time
added since the first third. Batch size, the GPU's clock, and the memory of the process are sampled in the background;
the first of them that changed too is reported as the likely reason.
"""

from statistics import median

from lightning_gpu_tools.advice.findings import Cause, Findings, Variant, label_of, median_interval
from lightning_gpu_tools.advice.lost_time import exposed_share, idle_share, lost_time
from lightning_gpu_tools.training.phases import MONITORING, PAUSES, RANK_WAIT, TRAINING_STEP, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements, StepBlock
from lightning_gpu_tools.units import format_bytes

# Our defaults.
_MIN_TIMES = 1.2  # as long as in the first third
_MIN_BATCH_TIMES = 1.2  # as many elements
_MIN_LOST_CLOCK_PERCENT = 5.0  # of the highest clock, more than before
_MIN_MEMORY_BYTES = 2**20  # more than before: a steady step keeps nothing

_NOT_OF_STEP = (*PAUSES, MONITORING, RANK_WAIT)
_ADVICE = {
    "larger_batches": "If batches are not meant to grow, shuffle the samples, or limit the elements per batch.",
    "lower_clock": "Heat or the power limit lowers the clock more and more: nvidia-smi -q -d PERFORMANCE shows the "
    "reason. Check the air flow and the fans.",
    "kept_memory": "Each step works on everything that earlier steps have kept. Keep loss.detach() or loss.item() "
    "instead of a loss with its graph, and only the latest values: collections.deque(maxlen=1000).",
    "unknown": "Batches, clock and memory are as before.",
}


def find(run: RunMeasurements) -> Findings:
    third, steps_s = len(run.blocks) // 3, []
    for block in run.blocks:  # without pauses and waits
        parts_s = [seconds for phase, seconds in block.phase_s.items() if base_phase(phase) not in _NOT_OF_STEP]
        steps_s.append((sum(parts_s) - block.core_wait_s) / block.steps)
    early, late = median_interval(steps_s[:third]), median_interval(steps_s[-third:])
    if early is None or late is None or early[0] <= 0:
        return
    first_s = median(steps_s[:third])
    times, lower, upper = median(steps_s[-third:]) / first_s, late[0] / early[1], late[1] / early[0]
    if times < _MIN_TIMES:
        return
    first, last = (sum(blocks, StepBlock()) for blocks in (run.blocks[:third], run.blocks[-third:]))
    added_s = {
        phase: seconds / last.steps - first.phase_s.get(phase, 0.0) / first.steps
        for phase, seconds in last.phase_s.items()
        if base_phase(phase) not in _NOT_OF_STEP
    }
    phase = max(added_s, key=added_s.__getitem__)
    longer_s = [block.steps * max(0.0, own_s - first_s) for block, own_s in zip(run.blocks, steps_s, strict=True)]
    share = sum(longer_s) / run.wall_s
    if base_phase(phase) != TRAINING_STEP:  # even while the GPU is busy, a step may have more to do
        share = min(share * exposed_share(run, phase), idle_share(run))
    kind, what = _what_changed(run)
    yield lost_time(
        run,
        share,
        f"Steps in the last third took {times:.1f} times as long as in the first (95% interval {lower:.1f} to "
        f'{upper:.1f}), mostly in "{label_of(phase, run.activity)}"{what}. The added time is',
        _ADVICE[kind],
        phase=phase,
        evidence={"kind": kind, "times": times},
        has_lines=True,
        has_function=kind in ("kept_memory", "unknown"),
        basis="heuristic" if what else "measured",
        lower=share * (lower - 1) / (times - 1),
    )


def _what_changed(run: RunMeasurements) -> tuple[str, str]:
    """Return the kind, and a phrase about the quantity that changed along with the step time."""
    ends = {}
    for name, values in run.readings.items():
        third = len(values) // 3
        if third:
            ends[name] = median(values[:third]), median(values[-third:])
    first_items, last_items = ends.get("batch_items", (1.0, 1.0))
    first_percent, last_percent = ends.get("lost_clock_percent", (0.0, 0.0))
    first_bytes, last_bytes = ends.get("resident_bytes", (0.0, 0.0))
    if 0 < _MIN_BATCH_TIMES * first_items <= last_items:
        return "larger_batches", f", as batches have {last_items / first_items:.1f} times as many elements"
    if last_percent - first_percent >= _MIN_LOST_CLOCK_PERCENT:
        return "lower_clock", f", as the GPU's clock has lost {last_percent - first_percent:.0f}% of its maximum"
    if last_bytes - first_bytes >= _MIN_MEMORY_BYTES:
        return "kept_memory", f", as memory has grown by {format_bytes(last_bytes - first_bytes)}"
    return "unknown", ""


_SAYS = "Steps in the last third took ... times as long as in the first, "
CAUSE = Cause(
    rows=[
        Variant(
            f"{_SAYS}as batches have ... times as many elements",
            "no change if they are meant to grow; otherwise shuffle samples, or limit the elements per batch",
            "larger_batches",
        ),
        Variant(f"{_SAYS}as the GPU's clock has lost ...%", "cool it better, or raise the power limit", "lower_clock"),
        Variant(f"{_SAYS}as memory has grown", "keep `loss.detach()`, and only the latest values", "kept_memory"),
        Variant(f"{_SAYS}most of it in one line of the tree", "find what grows there", "unknown"),
    ],
    find=find,
    kind="busy",
    verified_on="cpu",
)
