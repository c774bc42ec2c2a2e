"""Looks inside three training steps with torch.profiler, once, and finds the source lines that wait for the GPU."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch.profiler import profile, record_function, supported_activities

from lightning_gpu_tools.training import compat
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


PROFILED_STEPS = 3
_MAX_TRACE_BYTES = 200 * 2**20  # our default: what can be read within a few seconds
_MAX_LINES = 3
# Whose lines are not the user's.
_FRAMEWORKS = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", __name__.partition(".")[0])


class StepProfiler:
    """Profiles the next three steps, and if they wait for the GPU finds out where in the one after.

    It wraps ``owner.run``, which runs a step, until it is done. A fault ends it, not the training. ``book`` calls a
    function with its time booked on this package; ``done`` is given the result, if there is one.
    """

    def __init__(
        self,
        owner: Any,
        module: torch.nn.Module,
        book: Callable[..., None],
        done: Callable[[ProfiledSteps], None],
    ) -> None:
        self._book = book
        self._done = done
        self._module = module
        self._profile: Any = None  # torch has no types for it
        self._result: ProfiledSteps | None = None
        self._steps = 0
        self._owner = owner
        self._wrapped = vars(owner).get("run")
        self._run = owner.run
        owner.run = self._step

    def close(self) -> None:
        """Leave the training alone. Idempotent."""
        if self._profile is not None:
            running, self._profile = self._profile, None
            with contextlib.suppress(RuntimeError):
                running.stop()
        if vars(self._owner).get("run") == self._step:
            if self._wrapped is None:
                del self._owner.run
            else:
                self._owner.run = self._wrapped

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if self._result is not None:
            return self._follow(*args, **kwargs)
        if self._profile is None:
            self._book(self._guard, self._start)
        if self._profile is None:  # it could not be started
            return self._run(*args, **kwargs)
        with record_function(STEP):
            result = self._run(*args, **kwargs)
        self._steps += 1
        if self._steps == PROFILED_STEPS:
            self._book(self._guard, self._stop)
        return result

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # noqa: BLE001 - without the profiler the diagnosis says less
            self.close()

    def _start(self) -> None:
        running: Any = profile(activities=supported_activities())  # type: ignore[no-untyped-call]
        running.start()
        self._profile = running

    def _stop(self) -> None:
        assert self._profile is not None
        running, self._profile = self._profile, None
        running.stop()
        result = self._result = _read(running)
        # Under a dispatch mode a compiled part would be compiled anew.
        if result is None or result.syncs_per_step < 1 or any(map(compat.is_compiled, self._module.modules())):
            self._finish()

    def _finish(self) -> None:
        self.close()
        if self._result is not None:
            self._done(self._result)

    def _follow(self, *args: Any, **kwargs: Any) -> Any:
        assert self._result is not None
        lines: Counter[str] = Counter()
        with _reads_counted(lines):
            result = self._run(*args, **kwargs)
        self._result = replace(self._result, sync_lines=tuple(line for line, _ in lines.most_common(_MAX_LINES)))
        self._book(self._guard, self._finish)
        return result


def _read(running: Any) -> ProfiledSteps | None:
    with tempfile.TemporaryDirectory(prefix="lightning-gpu-tools-") as folder:
        path = os.path.join(folder, "trace.json")
        running.export_chrome_trace(path)
        if os.path.getsize(path) > _MAX_TRACE_BYTES:
            return None
        with open(path, encoding="utf-8") as file:
            return read_trace(json.load(file)["traceEvents"])


def _reads_counted(lines: Counter[str]) -> contextlib.AbstractContextManager[Any]:
    """Return a context that counts by source line how often a tensor is asked for its value."""
    mode, value = compat.dispatch_mode(), compat.value_operation()
    if mode is None:
        return contextlib.nullcontext()

    class Counting(mode):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is value and (line := _users_line(sys._getframe(1))) is not None:
                lines[line] += 1
            return func(*args, **(kwargs or {}))

    return Counting()


def _users_line(frame: FrameType | None) -> str | None:
    """Return the innermost line of the user's, as ``train.py:42``."""
    while frame is not None:
        path = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _FRAMEWORKS and not path.startswith("<"):
            return f"{path.removeprefix(os.getcwd() + os.sep)}:{frame.f_lineno}"
        frame = frame.f_back
    return None
