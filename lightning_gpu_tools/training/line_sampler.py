"""Sampling of the source lines of the training thread and its loader's workers, at random moments, in windows.

Python switches threads only every 5 ms, so a sampler mostly gets the GIL when a thread releases it. It would sample
lines of torch and sleep too often, and lines of Python too rarely. While samples are taken, the switch interval is
0.1 ms. Lines that take several milliseconds at a time are then sampled correctly. For lines that take one millisecond,
up to half of the samples fall on the next line that releases the GIL (benchmarks/source_lines.py).
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
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from typing_extensions import override

from lightning_gpu_tools.background import BackgroundJobs
from lightning_gpu_tools.files import scratch_prefix
from lightning_gpu_tools.patches import Patches, frames_kept
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.dataset import DatasetGrowth, GrownAttribute
from lightning_gpu_tools.training.phases import DATA_LOADING, IN_WORKER, MONITORING, PAUSES, base_phase
from lightning_gpu_tools.training.run_measurements import SourceLine
from lightning_gpu_tools.training.source_lines import Place, line_of, lines_of
from lightning_gpu_tools.training.stacks import WorkerStacks, write_stack_at_signal
from lightning_gpu_tools.training.step_clock import StepClock

SWITCH_S = 0.0001  # 2% of Python's default: see above
# Our defaults.
MEAN_S = 1 / 20  # between two samples
WINDOW_SAMPLES = 200  # over 10 s: shares are then accurate to 7 points (95%)
_IDLE_S = 0.5  # poll interval while there is nothing to sample
_WORKER_START_S = 1.0  # in which a worker imports modules and opens files
_SAVE_EVERY = 40  # samples of a worker
_MAX_WORKERS = 256  # to sample: each epoch may start new ones

_worker_loop = compat.find(f"utils.data.{compat.WORKER_LOOP}")  # before any code replaces it


class _Sampler(BackgroundJobs):
    """A sampler of one thread of this process, running in a separate thread."""

    def __init__(self) -> None:
        super().__init__()
        self._thread_id = 0
        self._samples: Counter[Place] = Counter()
        self._random = random.Random(0)
        self._patches = Patches()

    def start(self, thread_id: int) -> None:
        """Start sampling a thread."""
        self._thread_id = thread_id
        self.add("Sampling source lines", self._sample)

    def _wait_s(self) -> float:
        """Return the seconds until the next check; 0: sample now."""
        raise NotImplementedError

    def _read_frame(self) -> tuple[str, FrameType | None]:
        """Return the phase that a sample counts for now, and the innermost frame of the thread."""
        raise NotImplementedError

    def _sample(self) -> float:
        try:
            wait_s = self._wait_s()
            if wait_s:
                self._patches.undo()
                return wait_s
            if sys.getswitchinterval() > SWITCH_S:
                self._patches.set_value(sys.getswitchinterval, sys.setswitchinterval, SWITCH_S)
            with frames_kept():
                phase, frame = self._read_frame()
                seen = None if frame is None or base_phase(phase) == MONITORING else line_of(frame)
                del frame  # with the batch in it
            if seen is not None and (seen.is_loading or phase != IN_WORKER):
                self._samples[phase, seen.file, seen.line, seen.function] += 1
        except BaseException:  # in any case, because the interval applies to the whole program
            self._patches.undo()
            raise
        return MEAN_S * self._random.uniform(0.5, 1.5)

    @override
    def close(self, timeout_s: float = 10.0) -> None:
        super().close(timeout_s)
        self._patches.undo()


class LineSampler(_Sampler):
    """A sampler of a training thread: 10 s of steady steps, and 10 s of each kind of pause."""

    def __init__(self, clock: StepClock, workers: WorkerLines, loaders: Callable[[], Sequence[object]]) -> None:
        super().__init__()
        # Samples while waiting for a batch, by the loader's place among several; None: none of torch's.
        self.waits: Counter[int | None] = Counter()
        self._clock = clock
        self._workers = workers
        self._loaders = loaders
        self._taken: Counter[str] = Counter()  # samples by pause; "" for steps

    @override
    def _wait_s(self) -> float:
        clock = self._clock
        if not clock.running or clock.steps <= clock.warm_up_steps:
            return _IDLE_S
        phase = base_phase(clock.current.phase)
        of = phase if phase in PAUSES else ""
        if self._taken[of] >= WINDOW_SAMPLES:
            return _IDLE_S
        self._taken[of] += 1
        return 0.0

    @override
    def _read_frame(self) -> tuple[str, FrameType | None]:
        # In one expression, within which Python does not switch threads. Afterwards the thread may be elsewhere.
        phase, frames = self._clock.current.phase, sys._current_frames()
        frame = frames.get(self._thread_id)
        # This frame is in them and would hold itself, and with it the step's batch and activations until a collection.
        frames.clear()
        if phase == DATA_LOADING and len(loaders := self._loaders()) > 1:
            self.waits[compat.loader_waited_for(frame, loaders)] += 1
        return phase, frame

    def seen(self, worker_pids: Collection[int]) -> tuple[SourceLine, ...]:
        """Return the sampled lines of the training thread and of these workers, most frequent first."""
        lines = [*lines_of(self._samples), *self._workers.lines(worker_pids)]
        return tuple(sorted(lines, key=lambda one: -one.samples))


class _WorkerSampler(_Sampler):
    """A sampler of this process, a worker, for 10 s. Saves the lines, and what grows in its dataset, to a file."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._path = os.path.join(folder, f"{os.getpid()}.json")
        self._taken = -1
        self._growth = DatasetGrowth(lambda: getattr(torch.utils.data.get_worker_info(), "dataset", None))
        self.start(threading.get_ident())
        self.add("Measuring the dataset", self._measure_dataset)

    @override
    def _wait_s(self) -> float:
        self._taken += 1
        if self._taken and self._taken % _SAVE_EVERY == 0:
            self._save()
        return _WORKER_START_S if not self._taken else float("inf") if self._taken > WINDOW_SAMPLES else 0.0

    @override
    def _read_frame(self) -> tuple[str, FrameType | None]:
        return IN_WORKER, sys._current_frames().get(self._thread_id)

    def _measure_dataset(self) -> float:
        wait_s = self._growth.poll()
        if self._growth.grown:
            self._save()
        return wait_s

    def _save(self) -> None:
        if self._samples or self._growth.grown:
            with open(f"{self._path}.part", "w") as file:
                json.dump([[(*place, count) for place, count in self._samples.items()], self._growth.grown], file)
            os.replace(file.name, self._path)

    @override
    def close(self, timeout_s: float = 1.0) -> None:
        super().close(timeout_s)
        self._save()


def _sampled_loop(folder: str, stacks: str, *args: Any, **kwargs: Any) -> Any:
    """Run the loop of a worker with sampling. A module-level function, so that it can be pickled without fork."""
    sampler, own = None, Path(folder, str(os.getpid()))
    Patches().put(torch.utils.data, compat.FETCH, compat.noting_index)  # for good: this process only loads
    with suppress(Exception):
        write_stack_at_signal(stacks)
    with suppress(Exception):
        own.touch()
        if sum(name.endswith(".json") for name in os.listdir(folder)) < _MAX_WORKERS:
            sampler = _WorkerSampler(folder)
    try:
        return _worker_loop(*args, **kwargs)
    finally:
        with suppress(Exception):
            own.unlink()
            if sampler is not None:
                sampler.close()


class WorkerLines:
    """What all workers that start while this is open sample, each in a file of a temporary folder.

    The folder also has an empty file for each worker that is running, with its PID as name. They also write their stack
    on demand, and add the index of the sample to errors of the dataset.
    """

    def __init__(self) -> None:
        self.stacks = WorkerStacks()
        self._folder: str | None = None
        self._saved: dict[int, tuple[Any, Any]] = {}  # by PID: lines, and what has grown

    def sampled(self, loop: Any) -> Any:
        """Return the loop for workers to run instead of torch's own. Return any other loop unchanged."""
        if loop is not _worker_loop:
            return loop
        try:
            self._folder = tempfile.mkdtemp(prefix=scratch_prefix())
        except OSError:  # no space for temporary files
            return loop
        return partial(_sampled_loop, self._folder, self.stacks.path)

    @property
    def pids(self) -> list[int]:
        """The PIDs of the workers that are running, of all loaders. Safe in any thread."""
        with suppress(OSError, TypeError):  # it has been removed; there is none
            return [int(name) for name in os.listdir(self._folder or "") if name.isdigit()]
        return []

    def lines(self, pids: Collection[int]) -> list[SourceLine]:
        """Return the lines sampled in these workers so far, without workers of validation or of a trial."""
        samples: Counter[Place] = Counter()
        for lines, _ in self._read(pids):
            for phase, file, line, function, count in lines:
                samples[phase, file, line, function] += count
        return lines_of(samples)

    def grown(self, pids: Collection[int]) -> list[GrownAttribute]:
        """Return what has grown of the dataset in these workers."""
        return [GrownAttribute(*fields) for _, grown in self._read(pids) for fields in grown]

    def _read(self, pids: Collection[int]) -> list[tuple[Any, Any]]:
        if self._folder is not None:
            with suppress(OSError, ValueError):  # a cleanup program removed them
                for name in {f"{pid}.json" for pid in pids}.intersection(os.listdir(self._folder)):
                    self._saved[int(name.removesuffix(".json"))] = json.loads(Path(self._folder, name).read_text())
        return [self._saved[pid] for pid in pids if pid in self._saved]

    def close(self) -> None:
        """Remove the files. Lines already read remain available."""
        self.stacks.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
