"""Which source lines the training thread, and the workers of its loader, are at: sampled at random moments, in windows.

Python hands its lock (the GIL) over only every 5 ms, so a sampler gets it where a thread lets it go by itself: it sees
lines of torch and of sleep too often, and lines of Python too rarely. While samples are taken, the lock is handed over
every 0.1 ms. What takes milliseconds at a time is then seen as often as it should be; of what takes one, up to half is
seen at the next line that lets go of the lock (benchmarks/source_lines.py).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from typing_extensions import override

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.background import BackgroundJobs
from lightning_gpu_tools.training.phases import IN_WORKER, MONITORING, PAUSES, SLOW_STEP, base_phase
from lightning_gpu_tools.training.run_measurements import SourceLine
from lightning_gpu_tools.training.source_lines import Seen, line_of
from lightning_gpu_tools.training.step_clock import StepClock

SWITCH_S = 0.0001  # a fiftieth of Python's own: see above
# Our defaults.
MEAN_S = 1 / 20  # between two samples
WINDOW_SAMPLES = 200  # of 10 s: then a share is known to 7 points (95 %)
_MAX_WINDOWS = 5  # of a training
_IDLE_S = 0.5  # after which to see whether there is something to sample
_NEW_PACE = 1.25  # steps have become so much slower or faster since the last window
_PACE_BLOCKS = 5  # of steps, whose median is the pace: one slow block is no change
_WORKER_START_S = 1.0  # in which a worker imports, and opens files
_SAVE_EVERY = 40  # samples of a worker
_MAX_WORKERS = 256  # that are sampled: each epoch may start new ones
_MAX_LINES = 1000  # that are kept, most frequent first

WORKER_LOOP = "_utils.worker._worker_loop"  # private in torch.utils.data. Without it no line of a worker is named.
_worker_loop = compat.worker_loop()  # before anybody replaces it


class _Counts:
    """How often each line was seen in each phase."""

    def __init__(self) -> None:
        self._samples: Counter[tuple[str, str, int, str]] = Counter()

    def add(self, phase: str, file: str, line: int, function: str, samples: int = 1) -> None:
        self._samples[phase, file, line, function] += samples

    def lines(self) -> list[SourceLine]:
        """Return them, most frequent first; from any thread."""
        return [
            SourceLine(phase=phase, file=file, line=line, function=function, samples=samples)
            for (phase, file, line, function), samples in self._samples.copy().most_common(_MAX_LINES)
        ]


class _Sampler(BackgroundJobs):
    """Samples one thread of this process, from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._thread_id = 0
        self._counts = _Counts()
        self._random = random.Random(0)
        self._switch_s: tuple[float, float] | None = None  # the program's, and ours

    def _begin(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self.add("Sampling source lines", self._sample)

    def _wait_s(self) -> float:
        """Return for how long not to sample; 0: sample now."""
        raise NotImplementedError

    def _phases(self, seen: Seen) -> Sequence[str]:
        """Return the phases that a sample counts for; asked right after it was taken."""
        raise NotImplementedError

    def _sample(self) -> float:
        try:
            wait_s = self._wait_s()
            if wait_s:
                self._switch_as_before()
                return wait_s
            self._switch_quickly()
            seen = line_of(sys._current_frames().get(self._thread_id))
            if seen is not None:
                for phase in self._phases(seen):
                    self._counts.add(phase, seen.file, seen.line, seen.function)
        except BaseException:  # whatever ends the sampling: the interval is the whole program's
            self._switch_as_before()
            raise
        return MEAN_S * self._random.uniform(0.5, 1.5)

    def _switch_quickly(self) -> None:
        before_s = sys.getswitchinterval()
        if self._switch_s is None and before_s > SWITCH_S:
            sys.setswitchinterval(SWITCH_S)
            self._switch_s = before_s, sys.getswitchinterval()

    def _switch_as_before(self) -> None:
        if self._switch_s is not None:
            before_s, ours_s = self._switch_s
            self._switch_s = None
            if sys.getswitchinterval() == ours_s:  # the program has not set it meanwhile
                sys.setswitchinterval(before_s)

    @override
    def close(self, timeout_s: float = 10.0) -> None:
        super().close(timeout_s)
        self._switch_as_before()


class LineSampler(_Sampler):
    """Samples a training thread: 10 s of steady steps, again when their pace has changed, and 10 s of each pause."""

    def __init__(self, clock: StepClock, workers: WorkerLines) -> None:
        super().__init__()
        self._clock = clock
        self._workers = workers
        self._taken: Counter[str] = Counter()  # in this window, by pause; "" for the steps
        self._windows = 1
        self._step_s: float | None = None  # the pace of the last window, since it has ended

    def start(self) -> None:
        """Begin; it samples as soon as there are steady steps."""
        self._begin(self._clock.thread_id)

    @override
    def _wait_s(self) -> float:
        clock = self._clock
        if not clock.running or clock.steps <= clock.warm_up_steps:
            return _IDLE_S
        phase = base_phase(clock.current.phase)
        of = phase if phase in PAUSES else ""
        if self._taken[of] >= WINDOW_SAMPLES and not self._begins_anew():
            return _IDLE_S
        self._taken[of] += 1
        return 0.0

    def _begins_anew(self) -> bool:
        """Begin another window if the steps have another pace."""
        blocks = self._clock.blocks[-_PACE_BLOCKS:]
        if self._windows >= _MAX_WINDOWS or len(blocks) < _PACE_BLOCKS:
            return False
        step_s = median(block.step_s for block in blocks)
        if self._step_s is None:
            self._step_s = step_s
        if 1 / _NEW_PACE <= step_s / max(self._step_s, 1e-9) <= _NEW_PACE:
            return False
        self._windows += 1
        self._step_s = None
        self._taken.clear()
        return True

    @override
    def _phases(self, seen: Seen) -> Sequence[str]:
        clock, phase = self._clock, self._clock.current.phase
        group = base_phase(phase)
        if group == MONITORING:
            return ()
        is_late = group not in PAUSES and clock.now_s - clock.step_began_s > clock.times.slow_from_s
        return (phase, f"{SLOW_STEP}/{phase}") if is_late else (phase,)

    def seen(self, worker_pids: Collection[int]) -> tuple[SourceLine, ...]:
        """Return the lines of the training thread and of these workers, most frequent first."""
        lines = [*self._counts.lines(), *self._workers.lines(worker_pids)]
        return tuple(sorted(lines, key=lambda one: -one.samples)[:_MAX_LINES])


class _WorkerSampler(_Sampler):
    """Samples this process, a worker, for 10 s, and keeps what was seen in a file."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._path = os.path.join(folder, f"{os.getpid()}.json")
        self._taken = -1
        self._begin(threading.get_ident())

    @override
    def _wait_s(self) -> float:
        self._taken += 1
        if self._taken and self._taken % _SAVE_EVERY == 0:
            self._save()
        return _WORKER_START_S if not self._taken else float("inf") if self._taken > WINDOW_SAMPLES else 0.0

    @override
    def _phases(self, seen: Seen) -> Sequence[str]:
        return (IN_WORKER,) if seen.is_loading else ()

    def _save(self) -> None:
        if lines := self._counts.lines():
            with open(f"{self._path}.part", "w") as file:
                json.dump([asdict(one) for one in lines], file)
            os.replace(file.name, self._path)

    @override
    def close(self, timeout_s: float = 1.0) -> None:
        super().close(timeout_s)
        self._save()


def _sampled_loop(folder: str, *args: Any, **kwargs: Any) -> Any:
    """Run what a worker runs, sampled; by its name, so that it can be pickled for a process that is not forked."""
    sampler = None
    with suppress(Exception):
        if len(os.listdir(folder)) < _MAX_WORKERS:
            sampler = _WorkerSampler(folder)
    try:
        return _worker_loop(*args, **kwargs)
    finally:
        with suppress(Exception):
            if sampler is not None:
                sampler.close()


class WorkerLines:
    """Lines seen by the workers of all loaders that were started meanwhile; each has a file in a temporary folder."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._lines: list[SourceLine] = []

    def sampled(self, loop: Any) -> Any:
        """Return what workers have to run instead of torch's own loop; another one stays as it is."""
        if loop is not _worker_loop:
            return loop
        try:
            self._folder = tempfile.mkdtemp(prefix="lightning-gpu-tools-")
        except OSError:  # no room for temporary files
            return loop
        return partial(_sampled_loop, self._folder)

    def lines(self, pids: Collection[int]) -> list[SourceLine]:
        """Return what these workers have seen so far: those of a validation, or of a trial, are others."""
        if self._folder is None:
            return self._lines
        counts = _Counts()
        with suppress(OSError, ValueError):  # a program that cleans up has removed them
            for name in {f"{pid}.json" for pid in pids}.intersection(os.listdir(self._folder)):
                for one in json.loads(Path(self._folder, name).read_text()):
                    counts.add(**one)
            self._lines = counts.lines()
        return self._lines

    def close(self) -> None:
        """Remove the files; what was read of them stays."""
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
