"""slow_steps: a few steps take much longer than the rest.

Finds steps that take twice the median, the line of the report in which they lose most of that time, the interval at
which they come, and whether their batches are longer. On a GPU, only time during which the GPU was idle counts. Lines
that have a cause of their own, such as callbacks and logging, do not count here.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from lightning_gpu_tools.advice.findings import Cause, Findings, label_of
from lightning_gpu_tools.advice.lost_time import exposed_share, idle_in_step_share, idle_share, lost_time
from lightning_gpu_tools.training.phases import DATA_LOADING, TRAINER, TRAINING_STEP, UNEXPLAINED, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements

# Our defaults.
_MIN_SHARE = 0.10  # of the wall time
_TIMES = 2.0  # as long as the median
_MIN_SLOW_STEPS = 3  # fewer are chance, which no change would prevent
# 75% of the intervals are multiples of the period. At least two, and 50% of all, equal it.
_REGULAR = 0.75
_MIN_INTERVALS = 2
_LONGER = 1.5  # times as many elements as in other batches

_PHASES = (TRAINING_STEP, DATA_LOADING, TRAINER, UNEXPLAINED)


def find(run: RunMeasurements) -> Findings:
    times = run.step_times
    if times is None:
        return
    # A step that was slow by the median at that time may not be slow by the median of the run.
    extra_s = {
        group: group.seconds - group.count * times.p50_s
        for group in times.slow
        if base_phase(group.phase) in _PHASES
        and group.count >= _MIN_SLOW_STEPS
        and group.seconds >= _TIMES * group.count * times.p50_s
    }
    if not extra_s:
        return
    slow = max(extra_s, key=extra_s.__getitem__)
    label, every = label_of(slow.phase, run.activity), _period(slow.steps)
    share, in_step = min(extra_s[slow] / run.wall_s, 1.0), idle_in_step_share(run)
    if base_phase(slow.phase) != TRAINING_STEP:
        share = min(share * exposed_share(run, slow.phase), idle_share(run))
    elif in_step is not None:  # while the GPU is busy, the host may only be waiting for it
        share = min(share, in_step)
    if share < _MIN_SHARE or every == run.accumulate_grad_batches:  # the optimizer's step is due then
        return
    longer = slow.batch_items / times.batch_items if slow.batch_items and times.batch_items else 1.0
    times_median = slow.seconds / slow.count / max(times.p50_s, 1e-9)
    if longer >= _LONGER:
        advice = (
            f"Slow steps have {longer:.1f} times as many elements per batch. Put samples of similar length into one "
            "batch, or limit its tokens."
        )
    elif every is not None:
        advice = f'Find what runs every {every} steps in "{label}". Run it less often, or make it faster.'
    else:
        latest = ", ".join(map(str, slow.steps[-5:]))
        advice = f'Find what the slow steps have in common in "{label}"; the latest are {latest}.'
    yield lost_time(
        run,
        share,
        f"{slow.count:,} of {times.count:,} steps took {times_median:.1f} times the median, in "
        f'"{label}". The extra time is',
        advice,
        phase=slow.phase,
        evidence={"every_steps": every},
        has_lines=True,
        basis="heuristic" if longer >= _LONGER else "measured",
    )


def _period(steps: Sequence[int]) -> int | None:
    """Return the interval at which these steps come, if it is regular. Neighbors count as one."""
    firsts = [step for before, step in pairwise((0, *steps)) if step - before > 1]
    apart = Counter(after - before for before, after in pairwise(firsts))
    if not apart:
        return None
    every, often = min(apart.items(), key=lambda item: (-item[1], item[0]))
    regular = sum(count for interval, count in apart.items() if interval % every == 0)
    intervals = apart.total()
    return every if often >= max(_MIN_INTERVALS, intervals / 2) and regular >= _REGULAR * intervals else None


CAUSE = Cause(
    says="... of ... steps took ... times the median: in which line of the tree, and how often",
    change="what the advice says: group samples of similar length, or find what runs at that period",
    find=find,
    leaves_explained=True,
    verified_on="cpu",
)
