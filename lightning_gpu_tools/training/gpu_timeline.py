"""For how long the GPU had run dry between two training steps, and what it needs for the parts of a step.

By the GPU's own times: CUDA events mark where one step ends and the next one begins, and where each part of that begins
and ends. They are read later, when the GPU has passed them; nothing ever waits for the GPU.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from lightning_gpu_tools.training.phases import (
    BACKWARD,
    FORWARD,
    HOST_TO_DEVICE_COPY,
    OPTIMIZER,
    PHASES,
    TRAINING_STEP,
    VALIDATION,
    base_phase,
)
from lightning_gpu_tools.training.run_measurements import GpuIdle

# Our default: how far a GPU's clock and the host's may drift apart; crystals keep within 50 parts in a million.
_DRIFT = 50e-6
# Our default: one gap in eight on average is sampled, at random, so that nothing periodic (a batch of each worker, a
# log) is always or never hit. What is rare is timed on the host.
_SAMPLE_EVERY = 8
# Our default: at most this many samples may be unread, because the host is that far ahead of the GPU.
_MAX_UNREAD = 64
# Our default: at most about this many parts of a step are marked; the rest counts as part of the one around them.
_MAX_PARTS = 256
# Our default: medians are taken over this many sampled steps, the last ones.
_MAX_LAST_STEPS = 64
# torch gives times since an event in milliseconds as 32-bit floats, which lose 4 us after a minute.
_NEW_ORIGIN_S = 60.0
_ORDER = list(PHASES)


class Gap(NamedTuple):
    """The time between two training steps, in seconds of the host's clock.

    Attributes:
        gpu_begin_s: The GPU has done all of the step before.
        gpu_end_s: The GPU comes to the step after.
        host_end_s: The host has put everything that comes before the step after into the GPU's queue: its batch.
        spent: What the host did up to then since it had put the step before into the queue, in this order.
    """

    gpu_begin_s: float
    gpu_end_s: float
    host_end_s: float
    spent: Sequence[tuple[str, float]]


def idle_by_phase(gap: Gap) -> dict[str, float]:
    """Return for how many seconds the GPU was idle, by what the host did meanwhile.

    Work of the host that the GPU's queue hides counts nothing. What the GPU still does before the next step when the
    host is already in it, or beyond, is the copy of its batch: no kernel runs meanwhile. In validation the GPU has work
    of its own, so that nothing is known of it.
    """
    idle: dict[str, float] = {}
    end_s = gap.host_end_s
    for phase, seconds in reversed(gap.spent):
        begin_s = end_s - seconds
        alone_s = min(end_s, gap.gpu_end_s) - max(begin_s, gap.gpu_begin_s)
        if alone_s > 0 and phase != VALIDATION:
            idle[phase] = idle.get(phase, 0.0) + alone_s
        end_s = begin_s
    copied_s = gap.gpu_end_s - max(gap.gpu_begin_s, gap.host_end_s)
    if copied_s > 0:
        idle[HOST_TO_DEVICE_COPY] = idle.get(HOST_TO_DEVICE_COPY, 0.0) + copied_s
    return idle


class HostTime:
    """Tells what time of the host a time of the GPU is, without ever making one wait for the other.

    Nothing happens on the GPU before the host has asked for it. So each event that the host records gives a least
    difference between the two clocks, which is exact where the GPU had nothing else to do; and it had not wherever
    there is a gap to be measured.
    """

    def __init__(self) -> None:
        self._ahead_s = -math.inf
        self._gpu_s = 0.0

    def learn(self, host_s: float, gpu_s: float) -> None:
        """Learn that the host recorded an event at ``host_s`` which the GPU came to at ``gpu_s``."""
        self._ahead_s -= _DRIFT * max(0.0, gpu_s - self._gpu_s)
        self._gpu_s = max(self._gpu_s, gpu_s)
        self._ahead_s = max(self._ahead_s, host_s - gpu_s)

    def at(self, gpu_s: float) -> float:
        """Return the host's time at a time of the GPU."""
        return gpu_s + self._ahead_s


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


class _Sample(NamedTuple):
    """A gap between two steps, and for the step after it from which event on the GPU was in which phase."""

    ended: _Mark
    begins: _Mark
    parts: list[tuple[str, _Event]]


class GpuTimeline:
    """Measures the gaps between training steps, and the steps after them.

    Wrap what runs a step with :meth:`around`, and what runs a part of it with :meth:`part`. Where no function does so,
    call :meth:`begin_step`, :meth:`enter` and :meth:`end_step`.

    ``seconds`` returns what the host has spent on each phase up to this moment; ``book`` calls a function with its time
    booked on this package.

    Attributes:
        failure: Why nothing more is measured; ``None`` if all is well.
        samples: How many steps were sampled and read so far.
    """

    def __init__(
        self, clock: Callable[[], float], seconds: Callable[[], dict[str, float]], book: Callable[..., None]
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._book = book
        self._random = random.Random(0)  # its own: the training's random numbers stay as they are
        self._steps_to_sample = 1
        self._sampling = True
        self._open: _Mark | None = None
        self._sample: _Sample | None = None
        self._unread: deque[_Sample] = deque()
        self._spare: list[_Event] = []
        self._origin: _Event | None = None
        self._origin_s = 0.0
        self._host_time = HostTime()
        self.samples = 0
        self._host_s: defaultdict[str, float] = defaultdict(float)
        self._idle_s: defaultdict[str, float] = defaultdict(float)
        self._seen: Counter[str] = Counter()
        self._step_s: defaultdict[str, float] = defaultdict(float)
        self._last_steps: deque[Mapping[str, float]] = deque(maxlen=_MAX_LAST_STEPS)
        self.failure: RuntimeError | None = None

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that runs a training step with its ends marked."""

        def stepped(*args: Any, **kwargs: Any) -> Any:
            self.begin_step()
            result = function(*args, **kwargs)
            self.end_step()
            return result

        return stepped

    def begin_step(self) -> None:
        """Mark that a training step begins, if that is sampled."""
        if self._sampling:
            self._book(self._guard, self._step_begins)

    def end_step(self) -> None:
        """Mark that it ends."""
        if self._sample is not None:
            self._book(self._guard, self._sample_ended)
        self._steps_to_sample -= 1
        if self._steps_to_sample <= 0:
            self._book(self._guard, self._step_ended)

    def part(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that runs a part of a training step with its ends marked in the steps that are sampled.

        Parts may be nested: an optimizer that is given a closure runs forward and backward in its step.
        """

        def marked(*args: Any, **kwargs: Any) -> Any:
            if self._sample is None or len(self._sample.parts) >= _MAX_PARTS:
                return function(*args, **kwargs)
            around, _ = self._sample.parts[-1]
            self._book(self._guard, lambda: self._part_begins(phase))
            try:
                return function(*args, **kwargs)
            finally:
                self._book(self._guard, lambda: self._part_begins(around))

        return marked

    def enter(self, phase: str) -> None:
        """Mark that from here on the GPU is in another phase of the step, if the step is sampled."""
        if self._sample is not None:
            self._book(self._guard, lambda: self._part_begins(phase))

    @property
    def own_step_s(self) -> float:
        """What these took the GPU in forward, backward and optimizer, in seconds."""
        return sum(self._step_s.get(phase, 0.0) for phase in (FORWARD, BACKWARD, OPTIMIZER))

    def facts(self) -> GpuIdle:
        """Return what has been seen so far."""
        self._guard(self._read)
        return GpuIdle(
            samples=self.samples,
            host_s=dict(self._host_s),
            idle_s=dict(self._idle_s),
            seen=dict(self._seen),
            step_s=dict(self._step_s),
            last_steps=tuple(self._last_steps),
        )

    def _guard(self, action: Callable[[], None]) -> None:
        """Do something with CUDA; an error that it brings to light is the training's, which will meet it, too."""
        if self.failure is None:
            try:
                action()
            except RuntimeError as error:
                self.failure = error.with_traceback(None)  # whose frames would keep a batch
                self._open, self._sample, self._sampling = None, None, False
                self._unread.clear()

    def _event(self) -> _Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _mark(self) -> _Mark:
        mark = _Mark(self._clock(), self._seconds(), self._event())
        mark.event.record()
        return mark

    def _step_ended(self) -> None:
        self._steps_to_sample = self._random.randint(1, 2 * _SAMPLE_EVERY - 1)
        self._read()
        if len(self._unread) < _MAX_UNREAD:
            self._open, self._sampling = self._mark(), True

    def _step_begins(self) -> None:
        self._sampling = False
        begins = self._mark()
        if self._open is not None:
            self._sample, self._open = _Sample(self._open, begins, [(TRAINING_STEP, begins.event)]), None
        else:  # the first step: the GPU has done nothing yet, so its time and the host's are one here
            self._origin = begins.event
            self._host_time.learn(begins.host_s, 0.0)

    def _part_begins(self, phase: str) -> None:
        if self._sample is not None:
            event = self._event()
            event.record()
            self._sample.parts.append((phase, event))

    def _sample_ended(self) -> None:
        assert self._sample is not None
        self._part_begins("")
        self._unread.append(self._sample)
        self._sample = None

    def _read(self) -> None:
        """Take in the samples that the GPU has passed."""
        while self._unread and self._unread[0].parts[-1][1].query():
            ended, begins, parts = self._unread.popleft()
            ended_s, begins_s = self._gpu_s(ended), self._gpu_s(begins)
            self._host_time.learn(ended.host_s, ended_s)
            self._host_time.learn(begins.host_s, begins_s)
            spent = _in_order(ended.seconds, begins.seconds)
            gap = Gap(self._host_time.at(ended_s), self._host_time.at(begins_s), begins.host_s, spent)
            self.samples += 1
            self._seen.update(phase for phase, _ in spent)
            for phase, seconds in spent:
                self._host_s[phase] += seconds
            for phase, seconds in idle_by_phase(gap).items():
                self._idle_s[phase] += seconds
            step_s: defaultdict[str, float] = defaultdict(float)
            for (phase, event), (_, next_event) in pairwise(parts):
                step_s[phase] += event.elapsed_time(next_event) / 1e3
            self._last_steps.append(step_s)
            for phase, seconds in step_s.items():
                self._step_s[phase] += seconds
            self._spare += (ended.event, *(event for _, event in parts[1:]))
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
    return _ORDER.index(base_phase(phase))
