"""slowing_down: steps take longer and longer over the run.

Fits a robust line (Theil-Sen) to steady steps in up to 63 windows. It counts only if the line fits the ranks of the
windows better than two jumps do, which rules out noise, a job that starts, and a slow beginning. Waits for CPU cores or
other ranks, and pauses such as validation, do not count. The share is the time added since the beginning; it is
subtracted from other findings. Quantities that may grow with the step time are read in the background; the size of the
loss's graph is read less and less often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_gpu_tools.advice.cause import Cause, Shape
from lightning_gpu_tools.advice.causes.unexplained import MAX_UNNAMED
from lightning_gpu_tools.advice.examples import a_block, cpu_run
from lightning_gpu_tools.advice.findings import FIND_FUNCTION, Basis, Evidence, Finding, ceiling, counted, with_share
from lightning_gpu_tools.advice.trend import rise, slope, steady_rise
from lightning_gpu_tools.advice.uneven_steps import MIN_UNEVEN, quoted, rounded
from lightning_gpu_tools.training.phases import (
    BACKWARD,
    DATA_LOADING,
    FORWARD,
    GRADIENT_CLIPPING,
    HOST_TO_DEVICE_COPY,
    LOGGING,
    MONITORING,
    OPTIMIZER,
    PAUSES,
    RANK_WAIT,
    TRAINING_STEP,
    ZERO_GRAD,
    base_phase,
)
from lightning_gpu_tools.training.run_measurements import LogFile, Quantity, RunMeasurements
from lightning_gpu_tools.units import format_bytes, printable

# Our defaults.
_MIN_WINDOWS = 24  # of at least ten steps each
_MAX_WINDOWS = 63  # which take some milliseconds to judge
_MIN_TIMES = 1.2  # as long as at the beginning
_MIN_TIMES_LOWER = 1.1  # the same, at the lower end of the 95 % interval
_NEARLY_ALL_PERCENT = 95.0  # of the added time, in one phase: "all of it"
_MOST_PERCENT = 50.0  # of the added time: if no phase has as much, all parts of the step became slower
# Quantities that grow with the step time: the median of the last third compared with that of the first.
_MIN_LOST_CLOCK_PERCENT = 5.0  # of the highest clock
_MIN_BATCH_TIMES = 1.2  # as many elements
_MIN_GRAPH_TIMES = 1.5  # as many operations
_MIN_BYTES_TIMES = 1.5  # as many bytes per step, written or read from storage
_MIN_WRITTEN_BYTES = 1024  # more per step
_MIN_STORAGE_BYTES = 65536  # more per step
_MIN_OBJECTS = 1000  # more
_MAX_S_PER_OBJECT = 1e-5  # that each adds to a step, as an operation of torch takes
_MIN_MEMORY_BYTES = 16 * 2**20  # more
_MAX_S_PER_BYTE = 1e-8  # that each adds to a step: 100 MB/s

_NOT_OF_STEP = (*PAUSES, MONITORING, RANK_WAIT)
_WITHOUT_PYTHON = (BACKWARD, OPTIMIZER, ZERO_GRAD, GRADIENT_CLIPPING, HOST_TO_DEVICE_COPY)


class _Sign(NamedTuple):
    """A quantity that grows with the step time, and what to do about it."""

    quantity: Quantity
    min_times: float
    min_rise: float
    max_s: float  # that one more of it can add to a step
    is_of: Callable[[str], bool]  # whether it can add to this phase
    grew: Callable[[float, float], str]
    advice: str
    shape: Shape


def _may_run_python(phase: str) -> bool:
    return phase not in _WITHOUT_PYTHON


def _is_in_step(phase: str) -> bool:
    return base_phase(phase) == TRAINING_STEP


def _holds_batch(phase: str) -> bool:
    return _is_in_step(phase) or phase in (DATA_LOADING, HOST_TO_DEVICE_COPY)


# The first one that applies is reported.
_SIGNS = (
    _Sign(
        "batch_items", _MIN_BATCH_TIMES, 1.0, math.inf, _holds_batch,
        lambda first, last: f"as batches have {rounded(last / max(first, 1.0))} times as many elements",
        "If batches are not meant to grow, shuffle the samples, or limit the elements per batch.",
        Shape(
            "..., as batches have ... times as many elements",
            "no change if they are meant to grow; otherwise shuffle samples, or limit the elements per batch",
            "larger_batches",
        ),
    ),
    _Sign(
        "graph_nodes", _MIN_GRAPH_TIMES, 1.0, math.inf, _is_in_step,
        lambda first, last: f"as the graph of the loss has grown from {first:,.0f} to {last:,.0f} operations",
        "A tensor that is kept from step to step also keeps its graph. Keep loss.detach() or loss.item() in sums and "
        "lists, and detach hidden states between steps.",
        Shape(
            "..., as the graph of the loss has grown from ... to ... operations",
            "`.detach()` or `.item()` for what is kept from step to step",
            "kept_graph",
        ),
    ),
    _Sign(
        "lost_clock_percent", 1.0, _MIN_LOST_CLOCK_PERCENT, math.inf, _is_in_step,
        lambda first, last: f"as the GPU's clock has lost {last - first:.0f} % of its maximum",
        "Heat or the power limit lowers the clock more and more: nvidia-smi -q -d PERFORMANCE shows the reason. Check "
        "the air flow and the fans.",
        Shape(
            "..., as the GPU's clock has lost ... % of its maximum", "cool it better, or raise the power limit",
            "lower_clock",
        ),
    ),
    _Sign(
        "written_bytes_per_step", _MIN_BYTES_TIMES, _MIN_WRITTEN_BYTES, math.inf, _may_run_python,
        lambda first, last: f"as {format_bytes(last)} are written per step instead of {format_bytes(first)}",
        "Append to the file instead of rewriting it.",
        Shape(
            "..., all of it in the logger ..., whose file has grown to ... rows",
            "append to the file instead of rewriting it; with `CSVLogger`, log the same metric names throughout",
            "rewritten_file",
        ),
    ),
    _Sign(
        "storage_bytes_per_step", _MIN_BYTES_TIMES, _MIN_STORAGE_BYTES, math.inf, lambda phase: phase == DATA_LOADING,
        lambda first, last: f"as {format_bytes(last)} are read from storage per step instead of {format_bytes(first)}",
        "The page cache no longer holds the data. Leave it more memory (use fewer workers, keep less in the program), "
        "or store smaller samples.",
        Shape(
            "..., as ... are read from storage per step instead of ...",
            "leave more memory to the page cache, or store smaller samples",
            "storage_reads",
        ),
    ),
    _Sign(
        "python_objects", 1.0, _MIN_OBJECTS, _MAX_S_PER_OBJECT, _may_run_python,
        lambda first, last: f"as {last - first:,.0f} more Python objects are kept",
        "A collection grows in every step, and each step iterates over all of it. Keep a running sum, or only the "
        f"latest values: collections.deque(maxlen=1000). {FIND_FUNCTION}",
        Shape(
            "..., as ... more Python objects are kept, with the source line",
            "running sums, or a `deque` with a `maxlen`, instead of a list that only grows",
            "kept_objects",
        ),
    ),
    _Sign(
        "resident_bytes", 1.0, _MIN_MEMORY_BYTES, _MAX_S_PER_BYTE, _may_run_python,
        lambda first, last: f"as memory has grown by {format_bytes(last - first)}",
        "An array or a tensor grows in every step, and torch.cat and numpy.concatenate copy all of it. Collect the "
        f"parts in a list, and join them once. {FIND_FUNCTION}",
        Shape(
            "..., as memory has grown by ..., with the source line",
            "collect parts in a list and join it once, instead of calling `torch.cat` in every step",
            "kept_memory",
        ),
    ),
)  # fmt: skip
_OF_ALL_PARTS = ("lower_clock", "larger_batches")
_WHOLE_STEP = Shape("..., in all parts", "check other programs and the temperature of the machine", "whole_step")
_UNKNOWN = Shape("..., all of it in one line of the tree, with the source line", "find what grows there", "unknown")


class _Slowdown(NamedTuple):
    first_s: float  # per step
    last_s: float
    times: tuple[float, float, float]  # the factor, and its 95 % interval
    share: float  # added time, of the wall time
    share_lower: float
    by_phase: Mapping[str, float]  # parts of the share, largest first
    slope_s: float  # per step, of the phase with the largest part


def slowing_down(run: RunMeasurements) -> Finding | None:
    """Return a finding if steps take longer and longer, else ``None``."""
    found = _slowdown(run)
    if found is None:
        return None
    phase, in_phase = next(iter(found.by_phase.items()))
    percent = 100 * in_phase / found.share
    kind, advice, of_kind = _what_grows(run, phase, percent, found.last_s - found.first_s)
    times, lower, upper = found.times
    evidence: Evidence = {
        "kind": kind,
        "phase": phase,
        "phase_percent": percent,
        "phase_ms_per_1000_steps": 1e6 * found.slope_s,
        "times": times,
        "times_lower": lower,
        "times_upper": upper,
        "first_step_ms": 1e3 * found.first_s,
        "last_step_ms": 1e3 * found.last_s,
        **of_kind,
    }
    basis: Basis = "measured" if kind in (_WHOLE_STEP.kind, _UNKNOWN.kind) else "heuristic"
    return replace(
        counted("slowing_down", found.share, evidence, advice, basis), ceiling_lower=ceiling(found.share_lower)
    )


def without_slowdown(
    run: RunMeasurements, found: Sequence[Finding], slower: Finding, phases_of: Callable[[Finding], Sequence[str]]
) -> list[Finding]:
    """Return the findings without the time added to steps. ``phases_of`` returns the phases of a finding."""
    slowdown, kept = _slowdown(run), []
    assert slowdown is not None
    for one in found:
        phases = {*phases_of(one), str(one.evidence.get("phase")), *(() if "name" in one.evidence else [one.cause])}
        added = sum(share for phase, share in slowdown.by_phase.items() if phases & {phase, base_phase(phase)})
        if slower.evidence["kind"] == "lower_clock" and one.cause in ("thermal_throttling", "power_cap"):
            added = slower.share
        rest = max(0.0, one.share - added)
        # The last steps of a steep rise are twice as long as the median.
        least = {"slow_steps": max(MIN_UNEVEN, one.share / 2), "unexplained": MAX_UNNAMED}.get(one.cause, 0.0)
        if not added:
            kept.append(one)
        elif rest > least:
            kept.append(with_share(one, rest))
    return kept


def _slowdown(run: RunMeasurements) -> _Slowdown | None:
    windows = list(run.blocks)
    while len(windows) > _MAX_WINDOWS:
        windows = [one + other for one, other in zip(windows[::2], windows[1::2], strict=False)]
    phases = {phase for one in windows for phase in one.phase_s if base_phase(phase) not in _NOT_OF_STEP}
    if len(windows) < _MIN_WINDOWS or not phases:
        return None
    by_phase = {phase: [one.phase_s.get(phase, 0.0) / one.steps for one in windows] for phase in sorted(phases)}
    waits_s = [one.core_wait_s / one.steps for one in windows]
    steps_s = [sum(parts) - wait for wait, *parts in zip(waits_s, *by_phase.values(), strict=True)]
    found = steady_rise(steps_s) if min(steps_s) > 0 else None
    if found is None or found.line.times < _MIN_TIMES or found.lower.times < _MIN_TIMES_LOWER:
        return None
    slopes = {phase: max(0.0, slope(values)) for phase, values in by_phase.items()}
    # A slope is 0 if the phase occurs in few windows, such as a log file written every 100 steps of a short run.
    whole = sum(slopes.values()) or 1.0
    added = found.line.added * sum(one.steps for one in windows) / run.wall_s
    shares = {phase: _lost(run, phase, added * part / whole) for phase, part in slopes.items()}
    share = sum(shares.values())
    if share <= 0:
        return None
    shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return _Slowdown(
        found.line.first,
        found.line.last,
        (found.line.times, found.lower.times, found.upper.times),
        share,
        share * found.lower.added / found.line.added,
        shares,
        slopes[next(iter(shares))] / windows[0].steps,
    )


def _lost(run: RunMeasurements, phase: str, share: float) -> float:
    if _is_in_step(phase):
        return share  # even while the GPU is busy: it has more to do, or is slower
    return min(share * run.exposed(phase), run.idle_share)


def _what_grows(run: RunMeasurements, phase: str, percent: float, added_s: float) -> tuple[str, str, Evidence]:
    """Return the kind, advice and evidence of the first sign that applies."""
    is_everywhere = percent < _MOST_PERCENT
    for sign in _SIGNS:
        ends, kind = rise(run.readings.get(sign.quantity, ())), sign.shape.kind
        if ends is None or not sign.is_of(phase) or (is_everywhere and kind not in _OF_ALL_PARTS):
            continue
        first, last = ends
        if last < sign.min_times * first or last - first < max(sign.min_rise, added_s / sign.max_s):
            continue
        evidence: Evidence = {
            f"{sign.quantity}_first": first, f"{sign.quantity}_last": last, "what_grew": sign.grew(first, last)
        }  # fmt: skip
        file = run.log_files.get(phase.partition("/")[2]) if base_phase(phase) == LOGGING else None
        if kind != "rewritten_file" or file is None:
            return kind, sign.advice, evidence
        size = format_bytes(file.size_bytes) if file.rows is None else f"{file.rows:,} rows"
        evidence |= {"what_grew": f"whose file {printable(file.name, 60)} has grown to {size}", "log_rows": file.rows}
        is_csv = phase == f"{LOGGING}/CSVLogger"
        return kind, _OF_CSV_LOGGER if is_csv else sign.advice, evidence
    if is_everywhere:
        advice = "Other programs or heat may slow the whole machine down: check top, and the clocks of the CPU cores."
        return _WHOLE_STEP.kind, advice, {}
    return _UNKNOWN.kind, f"No measured quantity grows with it. {FIND_FUNCTION}", {}


_OF_CSV_LOGGER = (
    "CSVLogger rewrites its whole file for each metric with a new name. Log the same names throughout, or use "
    "TensorBoardLogger, which only appends."
)


def _begins(evidence: Mapping[str, float | str], has_trainer: bool) -> str:
    times, lower, upper = (rounded(evidence[name]) for name in ("times", "times_lower", "times_upper"))
    percent = float(evidence["phase_percent"])
    if percent < _MOST_PERCENT:
        where = "in all parts"
    else:
        part = "all" if percent >= _NEARLY_ALL_PERCENT else f"{percent:.0f} %"
        where = f"{part} of it in {quoted(str(evidence['phase']))}"
    grew = f", {evidence['what_grew']}" if "what_grew" in evidence else ""
    return f"Steps became {times} times as long (95 % interval {lower} to {upper}), {where}{grew}. The added time is"


def _with_logging(*ms: float) -> RunMeasurements:
    """Return windows of ten steps of 20 ms with these milliseconds in a logger that writes ever more."""
    logging = f"{LOGGING}/CSVLogger"
    return replace(
        cpu_run({FORWARD: 20.0}),
        wall_s=sum(20.0 + one for one in ms) / 100,
        steps=10 * len(ms),
        phase_s={FORWARD: 0.2 * len(ms), logging: sum(ms) / 100},
        blocks=[a_block({FORWARD: 20.0, logging: one}) for one in ms],
        readings={"written_bytes_per_step": [(10.0 * i, 5000.0 * i) for i in range(len(ms))]},
        log_files={"CSVLogger": LogFile(name="metrics.csv", size_bytes=2_100_000, rows=41_000)},
    )


CAUSE = Cause(
    begins=_begins,
    rows=[
        one._replace(says=f"Steps became ... times as long{one.says.removeprefix('...')}")
        for one in (*(sign.shape for sign in _SIGNS), _WHOLE_STEP, _UNKNOWN)
    ],
    phases=lambda evidence: [str(evidence["phase"])],
    counts_while_busy=True,
    is_in_step=lambda evidence: base_phase(str(evidence["phase"])) == TRAINING_STEP,
    verified_on="cpu",
    sick=_with_logging(*range(1, 31)),
    healthy=_with_logging(*[1.0] * 15, *[16.0] * 15),
)
