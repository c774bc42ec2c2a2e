"""The GPU's idle time between training steps and its work on the parts of a step, measured with CUDA events.

Events are read once the GPU has passed them; nothing ever waits for the GPU.

The time between two events is all work if the host queued everything before the GPU reached the first event. If the
GPU is not that far behind, a few steps are held: the GPU sleeps before each part, and after each wait of the host for
the GPU. It sleeps longer than the host needed to queue the same part in an earlier step that was only watched.

A step that records a CUDA graph is not sampled from there on: events and sleeps would become part of the graph. Steps
that replay one are sampled like any other, with the replay as one part.
"""

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch

from lightning_gpu_tools.training import compat, gpu_work, phases
from lightning_gpu_tools.training.run_measurements import IdleTimes
from lightning_gpu_tools.training.source_lines import SyncLines
from lightning_gpu_tools.training.stopwatch import Stopwatch

# Parts between two steps that may launch kernels: callbacks after a step, and hooks that receive the next batch.
AFTER_STEP, BEFORE_STEP = "after a step", "before a step"

# Our defaults.
# On average, one of this many steps is sampled, at random, so that periodic work is neither always nor never sampled. A
# sample takes about 200 µs. The first ones come early enough to judge short training runs.
_SAMPLE_EVERY, _SAMPLE_LATER_EVERY, _EARLY_SAMPLES = 8, 128, 64
_SKIPPED = 4  # steps skipped at the start, while kernels are loaded, and after a held step, until the GPU finishes it
_MAX_UNREAD = 64  # samples, if the GPU is far behind the host
_MAX_PARTS = 256  # of a step; further parts count toward the enclosing one
_MAX_SAMPLES = 512  # that the facts are about: the latest
_MAX_RANK_WAITS = 32  # steps, which ranks publish
# After these samples, one step is watched and the next one held: often at first, and 16 times in total.
_WATCH_AFTER = frozenset(2**power for power in range(16))
_HELD = frozenset({phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER, AFTER_STEP, BEFORE_STEP})
_MIN_MEASURED = 2  # measurements needed to report the GPU's work
_CYCLES_PER_S = 1e9  # of the GPU's sleep, until it has been timed; GPUs run at 1 to 2 GHz
# torch returns the time between events in milliseconds as a 32-bit float, which loses 4 µs after a minute.
_NEW_ORIGIN_S = 60.0
_ORDER = list(phases.PHASES)

_Function = Callable[..., Any]
_Event = Any  # torch.cuda.Event, which has no types
_Seconds = defaultdict[str, float]  # by phase


@dataclass(slots=True)
class _Sample:
    """A step, and the gap between it and the previous step."""

    kind: Literal["timed", "watched", "held"]
    parts: list[gpu_work.Part] = field(default_factory=list)
    parts_before: int = 0  # number of parts before the step
    step: int = 0


class GpuTimeline:
    """A timeline of the gaps between training steps and of the steps after them."""

    def __init__(
        self, gpu: torch.device, clock: Stopwatch, own_work: Callable[..., None], leave_out: Callable[[], None]
    ) -> None:
        """``own_work`` charges its calls to this package; ``leave_out`` exempts the next two steps from being slow."""
        self.syncs = SyncLines(gpu, clock, self._synced)
        self._gpu = gpu
        self._clock = clock
        self._own_work = own_work
        self._leave_out = leave_out
        # Identical on all ranks, and a separate generator, so that training's random numbers do not change.
        self._random = random.Random(0)
        self._steps_to_sample: float = _SKIPPED
        self._taken = 0  # number of timed samples
        self._due: list[Literal["watched", "held"]] = []
        self.is_next_sampled = True  # whether the next step is
        self._open: _Sample | None = None  # between two steps
        self.sample: _Sample | None = None  # within a step
        self._unread: deque[_Sample] = deque()
        self._sleep = compat.find(compat.GPU_SLEEP)
        self._cycles_per_s = _CYCLES_PER_S
        self._origin: _Event = None
        self._origin_s = 0.0
        self._host_time = gpu_work.HostTime()
        # The number of a step, the gap before it, including the GPU's work in it, and the seconds of its parts.
        self._timed: deque[tuple[int, gpu_work.Gap, _Seconds]] = deque(maxlen=_MAX_SAMPLES)
        self._steps = 0
        self._work: defaultdict[str, gpu_work.Work] = defaultdict(gpu_work.Work)
        self._measured = 0  # samples of work, held or not

    def begin_step(self, phase: str = phases.TRAINING_STEP) -> None:
        """Mark the start of a step and of its first part if the step is sampled."""
        if self.is_next_sampled:
            self._own_work(self._guard, self._step_begins, phase)

    def end_step(self) -> None:
        """Mark the end of a step."""
        self._steps += 1
        if self.sample is not None:
            self._own_work(self._guard, self._sample_ended)
        self._steps_to_sample -= 1
        if self._steps_to_sample <= 0:
            self._own_work(self._guard, self._step_ended)

    def part(self, phase: str, function: _Function) -> _Function:
        """Wrap a function that runs a part of a step to mark its start and end. Parts may be nested."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            if self.sample is None or len(self.sample.parts) >= _MAX_PARTS:
                return function(*args, **kwargs)
            around = self.sample.parts[-1].phase
            self.enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(around)

        return marked

    def enter(self, phase: str) -> None:
        """Mark the start of another phase of the step if the step is sampled."""
        if self.sample is not None:
            self._own_work(self._guard, self._part_begins, self.sample, phase)

    def begin_fetch(self) -> None:
        """Mark the start of the host's wait for the next batch if the next step is sampled."""
        if self._open is not None:
            self._own_work(self._guard, self._part_begins, self._open, phases.DATA_LOADING)

    def enter_hook(self) -> None:
        """Mark that a hook receives the batch, unless another hook received it before."""
        if self._open is not None and self._open.parts[-1].phase == phases.DATA_LOADING:
            self._own_work(self._guard, self._part_begins, self._open, BEFORE_STEP)

    def facts(self) -> IdleTimes:
        """Return the measurements of the latest samples."""
        self._guard(self._read)
        worked_s = [self._work[phase].usual_s for phase in (AFTER_STEP, BEFORE_STEP)]
        host_s: _Seconds = defaultdict(float)
        idle_s: _Seconds = defaultdict(float)
        seen = Counter[str]()
        for _, gap, _ in self._timed:
            seen.update({phase for phase, _ in gap.spent})
            _add(host_s, gap.spent)
            _add(idle_s, gpu_work.idle_by_phase(gpu_work.without_work(gap, *worked_s)).items())
        return IdleTimes(
            samples=len(self._timed),
            host_s=host_s,
            idle_s=idle_s,
            seen=seen,
            steps_s=tuple(step_s for _, _, step_s in self._timed),
            rank_wait_s={
                step: gpu_work.rank_wait_s(gap) + step_s.get(phases.RANK_WAIT_IN_STEP, 0.0)
                for step, gap, step_s in [*self._timed][-_MAX_RANK_WAITS:]
            },
            work_s={
                phase: work.usual_s * work.seen / self._measured
                for phase, work in self._work.items()
                if len(work.seconds) >= _MIN_MEASURED
            },
        )

    def _guard(self, action: _Function, *args: Any) -> None:
        """Run an action that uses CUDA. An error that it surfaces is the program's, which will see it as well."""
        try:
            with torch.cuda.device(self._gpu):  # or events start CUDA on the current GPU, if that is another one
                if torch.cuda.is_current_stream_capturing():
                    self._drop()
                else:
                    action(*args)
        except Exception:  # noqa: BLE001 - an unknown torch is no reason to stop training, either
            self._drop()
            self.is_next_sampled, self._steps_to_sample = False, math.inf
            self._unread.clear()

    def _drop(self) -> None:
        """Discard the current sample and its preparations."""
        self._open = self.sample = None
        self.is_next_sampled = self._origin is None
        self._due.clear()
        self.syncs.stop(is_whole=False)

    def _step_ended(self) -> None:
        self._read()
        kind = self._due.pop(0) if self._due else "timed"
        soonest = 1 if kind == "timed" else _SKIPPED
        every = _SAMPLE_EVERY if self._taken < _EARLY_SAMPLES else _SAMPLE_LATER_EVERY
        self._steps_to_sample = 1 if self._due else self._random.randint(soonest, 2 * every - 1)
        if kind == "held":  # and the host may have to wait for it in the next step, for example to copy pageable memory
            self._leave_out()
        if len(self._unread) < _MAX_UNREAD:
            self._open, self.is_next_sampled = _Sample(kind), True
            self._part_begins(self._open, AFTER_STEP)
            if kind != "timed":
                self.syncs.start()

    def _step_begins(self, phase: str) -> None:
        self.is_next_sampled = False
        if self._open is None:  # the first step: the GPU has done nothing yet, so its time equals the host's
            self._host_time.learn(self._clock.now_s, 0.0)
            self._origin = _event()
            return
        self.sample, self._open = self._open, None
        self.sample.parts_before, self.sample.step = len(self.sample.parts), self._steps
        self._part_begins(self.sample, phase)

    def _part_begins(self, sample: _Sample, phase: str) -> None:
        """End the previous part, and begin a new one."""
        self._clock.switch(self._clock.current)  # charges the time up to now, before the event: see gpu_work.HostTime
        if sample.parts:
            self._end_part(sample)
        begin = sample.parts[-1].end if sample.parts else _event()
        part = gpu_work.Part(phase, begin, self._clock.since_s, self._clock.seconds)
        if sample.kind == "held" and phase in _HELD and self._sleep is not None:
            sleep_s, part.needed_s = self._work[phase].hold_s(sum(one.phase == phase for one in sample.parts))
            if sleep_s:
                part.cycles = int(sleep_s * self._cycles_per_s)
                self._sleep(part.cycles)
                part.hold, part.begin = begin, _event()
                part.begin_s = self._clock.now_s
        sample.parts.append(part)

    def _end_part(self, sample: _Sample) -> None:
        part = sample.parts[-1]
        part.host_s = self._clock.since_s - part.begin_s
        part.was_behind = not part.begin.query()
        part.end = _event()

    def _synced(self) -> None:
        """Record that the host has waited for the GPU in a step that is watched or held."""
        sample = self.sample or self._open
        if sample is not None and len(sample.parts) < _MAX_PARTS:
            sample.parts[-1].has_synced = True
            self._own_work(self._guard, self._part_begins, sample, sample.parts[-1].phase)

    def _sample_ended(self) -> None:
        assert self.sample is not None
        sample, self.sample = self.sample, None
        self._end_part(sample)
        self.syncs.stop()
        self._unread.append(sample)
        if sample.kind == "watched":
            for phase, parts in gpu_work.by_phase(sample.parts).items():
                self._work[phase].watched = parts
        elif sample.kind == "timed":
            self._taken += 1
            if self._taken in _WATCH_AFTER:
                self._due = ["watched", "held"]
                self._steps_to_sample = 1

    def _read(self) -> None:
        while self._unread and self._unread[0].parts[-1].end.query():
            sample = self._unread.popleft()
            # In table order only within a part: a callback after a step has the same phase as one before it.
            gap = sample.parts[: sample.parts_before + 1]
            spent = [one for before, after in pairwise(gap) for one in _in_order(before.seconds, after.seconds)]
            self._read_work(sample, validates=any(phase == phases.VALIDATION for phase, _ in spent))
            if sample.kind == "timed":
                self._read_times(sample, spent)

    def _read_work(self, sample: _Sample, *, validates: bool) -> None:
        self._measured += 1
        for phase, parts in gpu_work.by_phase(sample.parts).items():
            work = self._work[phase]
            work.seen += 1
            work.has_synced |= any(part.has_synced for part in parts)
            for part in parts:
                if part.hold is not None:
                    self._cycles_per_s = part.cycles / max(1e-6, part.slept_s)
            if all(part.is_work for part in parts):
                if not (validates and phase == AFTER_STEP):
                    work.seconds.append(sum(part.gpu_s for part in parts))
            elif any(part.hold is not None for part in parts):
                work.failed += 1

    def _read_times(self, sample: _Sample, spent: Sequence[tuple[str, float]]) -> None:
        ended, begins = sample.parts[0], sample.parts[sample.parts_before]
        ended_s, begins_s = self._gpu_s(ended.begin), self._gpu_s(begins.begin)
        self._host_time.learn(ended.begin_s, ended_s)
        self._host_time.learn(begins.begin_s, begins_s)
        gap = gpu_work.Gap(self._host_time.at(ended_s), self._host_time.at(begins_s), begins.begin_s, spent)
        step_s: _Seconds = defaultdict(float)
        _add(step_s, ((part.phase, part.gpu_s) for part in sample.parts[sample.parts_before :]))
        self._timed.append((sample.step, gap, step_s))
        if begins_s - self._origin_s > _NEW_ORIGIN_S:
            self._origin, self._origin_s = begins.begin, begins_s

    def _gpu_s(self, event: _Event) -> float:
        return self._origin_s + float(self._origin.elapsed_time(event)) / 1e3


def _event() -> _Event:
    """Record where the GPU is in its work."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _add(totals: _Seconds, times: Iterable[tuple[str, float]]) -> None:
    for phase, seconds in times:
        totals[phase] += seconds


def _in_order(before: dict[str, float], after: dict[str, float]) -> list[tuple[str, float]]:
    ordered = sorted(after, key=lambda phase: _ORDER.index(phases.base_phase(phase)))
    spent = [(phase, after[phase] - before.get(phase, 0.0)) for phase in ordered]
    return [(phase, seconds) for phase, seconds in spent if seconds > 0]
