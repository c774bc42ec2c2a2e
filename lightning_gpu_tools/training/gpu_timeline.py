"""How long the GPU was idle between two training steps, and how long it needs for the parts of one, by CUDA events.

Events are read once the GPU has passed them; nothing ever waits for the GPU.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_gpu_tools.training.phases import (
    BACKWARD,
    FORWARD,
    HOST_TO_DEVICE_COPY,
    OPTIMIZER,
    PHASES,
    RANK_WAIT,
    TRAINING_STEP,
    VALIDATION,
    base_phase,
)
from lightning_gpu_tools.training.run_measurements import GpuIdle

if TYPE_CHECKING:
    from lightning_gpu_tools.training.step_clock import StepClock

# Between the GPU's clock and the host's; crystals keep within 50 parts in a million.
_DRIFT = 50e-6
# Our defaults.
_SAMPLE_EVERY = 8  # on average: at random, so that nothing periodic is always or never hit
_MAX_UNREAD = 64  # samples, where the GPU is far behind the host
_MAX_PARTS = 256  # of a step; the rest counts as part of the one around them
_MAX_LAST_STEPS = 64
# torch gives times since an event in milliseconds as 32-bit floats, which lose 4 us after a minute.
_NEW_ORIGIN_S = 60.0
_ORDER = list(PHASES)

_Function = Callable[..., Any]
_Event = Any  # torch.cuda.Event, which has no types
_Seconds = defaultdict[str, float]  # by phase


class Gap(NamedTuple):
    """The time between two training steps, in seconds of the host's clock."""

    gpu_begin_s: float  # the GPU ends the step before
    gpu_end_s: float  # the GPU begins the step after
    host_end_s: float  # the host has queued all that comes before the step after
    spent: Sequence[tuple[str, float]]  # what the host did until then since it queued the step before, in order


def idle_by_phase(gap: Gap) -> dict[str, float]:
    """Return the seconds in which the GPU was idle, by what the host did meanwhile.

    Validation has kernels of its own, and a GPU waits for other ranks in one of NCCL's. What it does when the host is
    already in the next step is to copy the batch, without a kernel.
    """
    idle: _Seconds = defaultdict(float)
    end_s = gap.host_end_s
    for phase, seconds in reversed(gap.spent):
        begin_s = end_s - seconds
        alone_s = min(end_s, gap.gpu_end_s) - max(begin_s, gap.gpu_begin_s)
        if alone_s > 0 and base_phase(phase) not in (VALIDATION, RANK_WAIT):
            idle[phase] += alone_s
        end_s = begin_s
    copied_s = gap.gpu_end_s - max(gap.gpu_begin_s, gap.host_end_s)
    if copied_s > 0:
        idle[HOST_TO_DEVICE_COPY] += copied_s
    return idle


class HostTime:
    """Converts the GPU's time to the host's.

    The GPU comes to an event only after the host has recorded it. So each event gives a lower bound of the difference,
    which is exact where the GPU was idle, as in every gap to be measured.
    """

    def __init__(self) -> None:
        self._ahead_s = -math.inf
        self._gpu_s = 0.0

    def learn(self, host_s: float, gpu_s: float) -> None:
        """Learn that the GPU came at ``gpu_s`` to an event that the host recorded at ``host_s``."""
        self._ahead_s -= _DRIFT * max(0.0, gpu_s - self._gpu_s)
        self._gpu_s = max(self._gpu_s, gpu_s)
        self._ahead_s = max(self._ahead_s, host_s - gpu_s)

    def at(self, gpu_s: float) -> float:
        """Return the host's time at a time of the GPU."""
        return gpu_s + self._ahead_s


class _Mark(NamedTuple):
    host_s: float
    seconds: dict[str, float]  # of the host by phase up to then
    event: _Event


class _Sample(NamedTuple):
    ended: _Mark  # the step before
    begins: _Mark  # the step after
    parts: list[tuple[str, _Event]]  # phases of the step after, each with the event at its begin


def enclosed(begin: Callable[[], None], function: _Function, end: Callable[[], None]) -> _Function:
    """Return the function with something done before it, and after it unless it raises."""

    def called(*args: Any, **kwargs: Any) -> Any:
        begin()
        result = function(*args, **kwargs)
        end()
        return result

    return called


class GpuTimeline:
    """Measures gaps between training steps, and the steps after them."""

    def __init__(self, clock: StepClock) -> None:
        self.samples = 0  # read so far
        self._clock = clock
        self._random = random.Random(0)  # its own: the training's random numbers stay as they are
        self._steps_to_sample = 1.0
        self._sampling = True
        self._open: _Mark | None = None
        self._sample: _Sample | None = None
        self._unread: deque[_Sample] = deque()
        self._spare: list[_Event] = []
        self._origin: _Event = None
        self._origin_s = 0.0
        self._host_time = HostTime()
        self._host_s: _Seconds = defaultdict(float)
        self._idle_s: _Seconds = defaultdict(float)
        self._step_s: _Seconds = defaultdict(float)
        self._seen = Counter[str]()
        self._last_steps: deque[Mapping[str, float]] = deque(maxlen=_MAX_LAST_STEPS)

    def around(self, function: _Function) -> _Function:
        """Return what runs a training step, with its ends marked."""
        return enclosed(self.begin_step, function, self.end_step)

    def begin_step(self) -> None:
        """Mark the begin of a step, if it is sampled."""
        if self._sampling:
            self._clock.as_own_work(self._guard, self._step_begins)

    def end_step(self) -> None:
        """Mark its end."""
        if self._sample is not None:
            self._clock.as_own_work(self._guard, self._sample_ended)
        self._steps_to_sample -= 1
        if self._steps_to_sample <= 0:
            self._clock.as_own_work(self._guard, self._step_ended)

    def part(self, phase: str, function: _Function) -> _Function:
        """Return what runs a part of a step, which may be within another one, with its ends marked."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            if self._sample is None or len(self._sample.parts) >= _MAX_PARTS:
                return function(*args, **kwargs)
            around, _ = self._sample.parts[-1]
            self.enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(around)

        return marked

    def enter(self, phase: str) -> None:
        """Mark that another phase of the step begins, if it is sampled."""
        if self._sample is not None:
            self._clock.as_own_work(self._guard, self._part_begins, phase)

    @property
    def own_step_s(self) -> float:
        """The GPU's seconds in forward, backward and optimizer of the sampled steps."""
        return sum(self._step_s.get(phase, 0.0) for phase in (FORWARD, BACKWARD, OPTIMIZER))

    def facts(self) -> GpuIdle:
        """Return what is known so far."""
        self._guard(self._read)
        return GpuIdle(
            samples=self.samples,
            host_s=dict(self._host_s),
            idle_s=dict(self._idle_s),
            seen=dict(self._seen),
            step_s=dict(self._step_s),
            last_steps=tuple(self._last_steps),
        )

    def _guard(self, action: _Function, *args: str) -> None:
        """Do something with CUDA; an error that it brings to light is the training's, which will meet it, too."""
        try:
            action(*args)
        except RuntimeError:
            self._open = self._sample = None
            self._sampling, self._steps_to_sample = False, math.inf
            self._unread.clear()

    def _event(self) -> _Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _mark(self) -> _Mark:
        self._clock.switch(self._clock.current)  # books the time up to now
        return _Mark(self._clock.since_s, self._clock.seconds, self._event())

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
        assert self._sample is not None
        self._sample.parts.append((phase, self._event()))

    def _sample_ended(self) -> None:
        assert self._sample is not None
        self._part_begins("")
        self._unread.append(self._sample)
        self._sample = None

    def _read(self) -> None:
        while self._unread and self._unread[0].parts[-1][1].query():
            ended, begins, parts = self._unread.popleft()
            ended_s, begins_s = self._gpu_s(ended), self._gpu_s(begins)
            self._host_time.learn(ended.host_s, ended_s)
            self._host_time.learn(begins.host_s, begins_s)
            spent = _in_order(ended.seconds, begins.seconds)
            gap = Gap(self._host_time.at(ended_s), self._host_time.at(begins_s), begins.host_s, spent)
            step_s: _Seconds = defaultdict(float)
            for (phase, event), (_, next_event) in pairwise(parts):
                step_s[phase] += event.elapsed_time(next_event) / 1e3
            self.samples += 1
            self._seen.update(phase for phase, _ in spent)
            _add(self._host_s, spent)
            _add(self._idle_s, idle_by_phase(gap).items())
            _add(self._step_s, step_s.items())
            self._last_steps.append(step_s)
            self._spare += (ended.event, *(event for _, event in parts[1:]))
            if begins_s - self._origin_s > _NEW_ORIGIN_S:
                self._origin, self._origin_s = begins.event, begins_s  # it is left out of the spare ones
            else:
                self._spare.append(begins.event)

    def _gpu_s(self, mark: _Mark) -> float:
        return self._origin_s + float(self._origin.elapsed_time(mark.event)) / 1e3


def _add(totals: _Seconds, times: Iterable[tuple[str, float]]) -> None:
    for phase, seconds in times:
        totals[phase] += seconds


def _in_order(before: dict[str, float], after: dict[str, float]) -> list[tuple[str, float]]:
    spent = [(phase, after[phase] - before.get(phase, 0.0)) for phase in sorted(after, key=_place)]
    return [(phase, seconds) for phase, seconds in spent if seconds > 0]


def _place(phase: str) -> int:
    return _ORDER.index(base_phase(phase))
