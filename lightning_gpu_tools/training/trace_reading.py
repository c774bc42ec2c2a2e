"""What a trace of torch.profiler says of a few training steps. Pure.

Events are as ``export_chrome_trace`` writes them: ``cat``, ``name``, ``ts`` and ``dur`` in microseconds, on one clock
for the host and the GPU.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import median
from typing import Any

from lightning_gpu_tools.training.run_measurements import ProfiledSteps

STEP = "lightning_gpu_tools.step"  # the annotation around each step

Span = tuple[float, float]  # begin and end in microseconds

_SLACK_US = 5.0  # by which the clocks of host and GPU may differ in a trace


def read_trace(events: Iterable[Mapping[str, Any]]) -> ProfiledSteps | None:
    """Return what the events say; ``None`` if no step is among them."""
    complete = [event for event in events if "dur" in event and "ts" in event]
    steps = sorted(
        _span(event) for event in complete if event.get("name") == STEP and event.get("cat") != "gpu_user_annotation"
    )
    if not steps:
        return None

    def of(category: str) -> list[Mapping[str, Any]]:
        begin, end = steps[0][0], steps[-1][1]
        return [event for event in complete if event.get("cat") == category and begin <= event["ts"] <= end]

    kernels, copies = of("kernel"), of("gpu_memcpy")
    busy = union(map(_span, kernels))
    computing = [_span(event) for event in kernels if "nccl" not in event["name"].lower()]
    waits = [_span(event) for event in of("cuda_runtime") if "Synchronize" in event["name"]]
    values = sum(event["name"] == "aten::_local_scalar_dense" for event in of("cpu_op"))  # .item() and its like
    count = len(steps)
    return ProfiledSteps(
        steps=count,
        wall_s=_length(steps) / 1e6,
        kernels_per_step=len(kernels) / count,
        kernel_median_us=median(event["dur"] for event in kernels) if kernels else None,
        syncs_per_step=max(values, len(waits)) / count,
        pageable_copies_per_step=sum("Pageable" in event["name"] for event in copies) / count,
        idle_s=_idle(steps, busy, union(map(_span, copies)), waits),
        exposed_communication_s=(_length(busy) - _length(union(computing))) / 1e6,
    )


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _idle(
    steps: Sequence[Span], busy: Sequence[Span], copying: Sequence[Span], waits: Sequence[Span]
) -> dict[str, float]:
    """Return the seconds within steps in which no kernel ran, by reason; none without kernels."""
    if not busy:
        return {}
    idle = {"copy": 0.0, "sync": 0.0, "launch": 0.0}
    waits = sorted(waits, key=itemgetter(1))
    for gap in _between(busy, steps[0][0], steps[-1][1]):
        in_step = sum(_overlap(gap, step) for step in steps)
        copied = min(in_step, sum(_overlap(gap, copy) for copy in copying))
        idle["copy"] += copied / 1e6
        idle["sync" if _follows_wait(gap, waits) else "launch"] += (in_step - copied) / 1e6
    return idle


def _follows_wait(gap: Span, waits: Sequence[Span]) -> bool:
    """Return whether the host had waited until the GPU was idle; waits are sorted by their ends."""
    first = bisect_left(waits, gap[0] - _SLACK_US, key=itemgetter(1))
    last = bisect_right(waits, gap[1], key=itemgetter(1))
    return any(begin <= gap[0] + _SLACK_US for begin, _ in waits[first:last])


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, those that touch or overlap made one."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _between(busy: Sequence[Span], begin: float, end: float) -> list[Span]:
    edges = [begin, *(edge for span in busy for edge in span), end]
    return [(left, right) for left, right in zip(edges[::2], edges[1::2], strict=True) if right > left]


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
