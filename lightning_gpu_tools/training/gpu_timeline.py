"""Looks at some training steps by the GPU's own times, to see when it had run dry; never waits for the GPU.

Two CUDA events mark where one step ends and the next one begins. They are read later, when the GPU has passed them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from lightning_gpu_tools.training.gpu_gaps import Gap, HostTime, IdleSums
from lightning_gpu_tools.training.run_measurements import GpuIdle

# A choice: one step in eight on average is looked at, at random, so that nothing that comes every so many steps (a
# batch of each worker, a log) is always or never hit. What is rare is timed on the host.
_LOOK_EVERY = 8
# A choice: so many looks may be unread, because the host is that far ahead of the GPU; beyond that none is begun.
_MOST_UNREAD = 64
# torch gives times since an event in milliseconds as 32-bit floats, which lose 4 us after a minute.
_NEW_ORIGIN_S = 60.0
# In this order the host does its work between two steps.
_ORDER = ("callback", "logging", "checkpoint", "validation", "monitoring", "trainer", "unexplained", "epoch_start",
          "data_loading", "host_to_device_copy")  # fmt: skip


class _Event(Protocol):
    """The part of ``torch.cuda.Event`` that is needed."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class _Mark(NamedTuple):
    """Where a step ended or began: when the host was there, what it had done by then, and the GPU's event."""

    host_s: float
    seconds: dict[str, float]
    event: _Event


class GpuTimeline:
    """Measures the gaps between training steps; wrap what runs a step with :meth:`around`.

    Args:
        clock: The host's clock.
        seconds: Returns what the host has spent on each phase up to this moment.
        book: Calls a function with its time booked on this package.

    Attributes:
        failure: Why nothing more is measured; ``None`` if all is well.
    """

    def __init__(
        self, clock: Callable[[], float], seconds: Callable[[], dict[str, float]], book: Callable[..., None]
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._book = book
        self._random = random.Random(0)  # its own: the training's random numbers stay as they are
        self._steps_to_look = 1
        self._looking = True
        self._open: _Mark | None = None
        self._unread: deque[tuple[_Mark, _Mark]] = deque()
        self._spare: list[_Event] = []
        self._origin: _Event | None = None
        self._origin_s = 0.0
        self._host_time = HostTime()
        self._sums = IdleSums()
        self.failure: RuntimeError | None = None

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that runs a training step with its ends marked."""

        def stepped(*args: Any, **kwargs: Any) -> Any:
            if self._looking:
                self._book(self._guard, self._step_begins)
            result = function(*args, **kwargs)
            self._steps_to_look -= 1
            if self._steps_to_look <= 0:
                self._book(self._guard, self._step_ended)
            return result

        return stepped

    def facts(self) -> GpuIdle:
        """Return what has been seen so far."""
        self._guard(self._read)
        return self._sums.facts()

    def _guard(self, action: Callable[[], None]) -> None:
        """Do something with CUDA; an error that it brings to light is the training's, which will meet it, too."""
        if self.failure is None:
            try:
                action()
            except RuntimeError as error:
                self.failure, self._open, self._looking = error, None, False
                self._unread.clear()

    def _mark(self) -> _Mark:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark = _Mark(self._clock(), self._seconds(), event)
        event.record()
        return mark

    def _step_ended(self) -> None:
        self._steps_to_look = self._random.randint(1, 2 * _LOOK_EVERY - 1)
        self._read()
        if len(self._unread) < _MOST_UNREAD:
            self._open, self._looking = self._mark(), True

    def _step_begins(self) -> None:
        self._looking = False
        begins = self._mark()
        if self._open is not None:
            self._unread.append((self._open, begins))
            self._open = None
        else:  # the first step: the GPU has done nothing yet, so its time and the host's are one here
            self._origin = begins.event
            self._host_time.learn(begins.host_s, 0.0)

    def _read(self) -> None:
        """Take in the looks that the GPU has passed."""
        while self._unread and self._unread[0][1].event.query():
            ended, begins = self._unread.popleft()
            ended_s, begins_s = self._gpu_s(ended), self._gpu_s(begins)
            self._host_time.learn(ended.host_s, ended_s)
            self._host_time.learn(begins.host_s, begins_s)
            self._sums.add(
                Gap(
                    gpu_begin_s=self._host_time.at(ended_s),
                    gpu_end_s=self._host_time.at(begins_s),
                    host_end_s=begins.host_s,
                    spent=_in_order(ended.seconds, begins.seconds),
                )
            )
            self._spare.append(ended.event)
            if begins_s - self._origin_s > _NEW_ORIGIN_S:
                self._origin, self._origin_s = begins.event, begins_s  # it is left out of the spare ones
            else:
                self._spare.append(begins.event)

    def _gpu_s(self, mark: _Mark) -> float:
        assert self._origin is not None
        return self._origin_s + self._origin.elapsed_time(mark.event) / 1e3


def _in_order(before: dict[str, float], after: dict[str, float]) -> list[tuple[str, float]]:
    spent = [(phase, seconds - before.get(phase, 0.0)) for phase, seconds in after.items()]
    return sorted(((phase, seconds) for phase, seconds in spent if seconds > 0), key=lambda one: _place(one[0]))


def _place(phase: str) -> int:
    group = phase.partition("/")[0]
    return _ORDER.index(group) if group in _ORDER else 0
