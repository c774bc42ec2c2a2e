"""What a trace of torch.profiler says of a few training steps. Pure.

It reads the events that ``torch.profiler.profile.export_chrome_trace`` writes: dictionaries with ``cat``, ``name``,
``ts`` and ``dur`` in microseconds, on one clock for the host and the GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from lightning_gpu_tools.training.run_measurements import ProfiledSteps

# The annotation around each step.
STEP = "lightning_gpu_tools.step"

Span = tuple[float, float]  # begin and end, in microseconds

# What makes the host wait until the GPU has run dry.
_SYNC_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize",
               "hipDeviceSynchronize")  # fmt: skip
_VALUE_OF_TENSOR = "aten::_local_scalar_dense"
# The clocks of host and GPU agree to some microseconds in a trace.
_SLACK_US = 5.0


def read_trace(events: Iterable[Mapping[str, Any]]) -> ProfiledSteps | None:
    """Return what the events say; ``None`` if no step is among them."""
    complete = [event for event in events if "dur" in event and "ts" in event]
    steps = sorted(
        _span(event) for event in complete if event.get("name") == STEP and event.get("cat") != "gpu_user_annotation"
    )
    if not steps:
        return None
    kernels = _of(complete, steps, "kernel")
    copies = _of(complete, steps, "gpu_memcpy")
    waits = [_span(event) for event in _of(complete, steps, "cuda_runtime") if event["name"].startswith(_SYNC_CALLS)]
    values = sum(1 for event in _of(complete, steps, "cpu_op") if event["name"] == _VALUE_OF_TENSOR)
    count = len(steps)
    return ProfiledSteps(
        steps=count,
        wall_s=sum(end - begin for begin, end in steps) / 1e6,
        kernels_per_step=len(kernels) / count,
        kernel_median_us=median(event["dur"] for event in kernels) if kernels else None,
        syncs_per_step=max(values, len(waits)) / count,
        pageable_copies_per_step=sum("Pageable" in event["name"] for event in copies) / count,
        idle_s=_idle(steps, [_span(event) for event in kernels], [_span(event) for event in copies], waits),
        exposed_communication_s=_exposed_communication(kernels) / 1e6,
    )


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _of(events: Sequence[Mapping[str, Any]], steps: Sequence[Span], category: str) -> list[Mapping[str, Any]]:
    """Return the events of a category from the beginning of the first step to the end of the last one."""
    begin, end = steps[0][0], steps[-1][1]
    return [event for event in events if event.get("cat") == category and begin <= event["ts"] <= end]


def _idle(
    steps: Sequence[Span], kernels: Sequence[Span], copies: Sequence[Span], waits: Sequence[Span]
) -> dict[str, float]:
    """Return the seconds in which no kernel ran while the host was in a step, by reason."""
    if not kernels:
        return {}
    idle = {"copy": 0.0, "sync": 0.0, "launch": 0.0}
    busy, copying = union(kernels), union(copies)
    ends = sorted(end for _, end in waits)
    for gap in _between(busy, steps[0][0], steps[-1][1]):
        in_step = sum(_overlap(gap, step) for step in steps)
        copied = min(in_step, sum(_overlap(gap, copy) for copy in copying))
        idle["copy"] += copied / 1e6
        idle["sync" if _follows_wait(gap, waits, ends) else "launch"] += (in_step - copied) / 1e6
    return idle


def _follows_wait(gap: Span, waits: Sequence[Span], ends: Sequence[float]) -> bool:
    """Return whether the host had waited for the GPU, and could only go on when it had run dry."""
    first = bisect_left(ends, gap[0] - _SLACK_US)
    return (
        first < len(ends)
        and ends[first] <= gap[1]
        and any(begin <= gap[0] + _SLACK_US and gap[0] - _SLACK_US <= end <= gap[1] for begin, end in waits)
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the spans with those that touch or overlap made one, in order."""
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


def _exposed_communication(kernels: Sequence[Mapping[str, Any]]) -> float:
    """Return the microseconds in which the GPU did nothing but communicate."""
    talking = union(_span(event) for event in kernels if "nccl" in event["name"].lower())
    computing = union(_span(event) for event in kernels if "nccl" not in event["name"].lower())
    hidden = sum(_overlap(one, other) for one in talking for other in computing)
    return sum(end - begin for begin, end in talking) - hidden
