"""Breakdown of training's wall time by phase, for a few microseconds a step and without synchronizing CUDA.

The phases add up to the wall time; untimed parts are ``unexplained``.
"""

import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter  # by name: a program's tests may replace those of `time`
from typing import Any

import torch

from lightning_gpu_tools.patches import Patches
from lightning_gpu_tools.processes import process_age_s
from lightning_gpu_tools.training import phases
from lightning_gpu_tools.training.cores import ThreadWait
from lightning_gpu_tools.training.gpu_timeline import GpuTimeline
from lightning_gpu_tools.training.run_measurements import IdleTimes, StepBlock, WatchedSteps
from lightning_gpu_tools.training.stopwatch import LoaderWaits, PhaseTimeline, StepTimeRecord, Stopwatch

# Steps in which kernels are chosen, caches fill, and workers start.
WARM_UP_STEPS = 20
# Our defaults. Adding up steps and measuring the CPU time of a fetch cost more than everything else, so both happen
# only at the end of a block.
_STEPS_PER_BLOCK = 10
_MAX_BLOCKS = 128

_Function = Callable[..., Any]


class StepClock(Stopwatch):
    """A stopwatch for the phases of training, on the training thread.

    A step lasts from the start of its fetch to the start of the next one.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        super().__init__(phases.UNEXPLAINED, clock)
        self.steps = self.epochs = 0  # number started
        self.epoch_steps = self._steps_before = 0  # number of the last complete epoch; those before the current one
        self.last_fetch_s = 0.0
        self.timeline = PhaseTimeline()
        self.validations = 0  # number started
        self.validation_waits = LoaderWaits(clock)
        self.checkpoints = 0  # number of steps after which any were written
        self.replays = 0  # of CUDA graphs
        self._checkpoint_step = -1
        self.core_wait = ThreadWait()  # of the training thread, during training
        self.running = False
        self._data_loading, self._epoch_start = self.account(phases.DATA_LOADING), self.account(phases.EPOCH_START)
        self._around_fetch = self._around_collection = self.current
        self._collection = self.account(phases.GARBAGE_COLLECTION)
        self.thread_id = 0  # of the training thread, once it has started
        self._before_fetch_s = 0.0
        self._gpu: GpuTimeline | None = None
        self._patches = Patches()
        self._started_s = self._stopped_s = 0.0
        self._first_of_epoch = True
        self._fetch_since_s: tuple[float, float, float] | None = None
        self._fetch_cpu_s = self._fetch_process_cpu_s = self._fetch_core_wait_s = 0.0
        self.ready_batches = 0  # that a loader's workers keep; training takes them first
        self.begin_anew()

    def begin_anew(self) -> None:
        """Discard the steady steps; the next steps count as warm-up again."""
        self.times = StepTimeRecord(self._accounts.values(), [self.account(phase) for phase in phases.PAUSES])
        self.blocks: list[StepBlock] = []  # of steady steps: without warm-up and the first step of each epoch
        self.warm_up_steps = self.steps + max(WARM_UP_STEPS, 2 * self.ready_batches)
        self._open, self._steps_per_block = StepBlock(), _STEPS_PER_BLOCK
        self._sum_from: StepBlock | None = None
        self._next_sum = 0

    def start(self) -> None:
        """Start charging time."""
        self.since_s = self._started_s = self._clock()
        self.running = True
        self.thread_id = threading.get_ident()
        self.core_wait.open()
        self._patches.add_to(gc.callbacks, self._book_collection)
        self.timeline.cut(self._started_s, {}, 0)

    def stop(self) -> None:
        """Stop the measurement. Idempotent."""
        if self.running:
            self._patches.undo()
            self.switch(self.account(phases.UNEXPLAINED))
            self._stopped_s = self.since_s
            self.running = False
            if self._gpu is not None:
                self._gpu.syncs.stop()
            self.core_wait.close()
            self.timeline.cut(self._stopped_s, self.seconds, self.steps)

    def _book_collection(self, stage: str, info: dict[str, int]) -> None:
        """Charge the time of a garbage collection in this thread; generation 0 takes almost none and is ignored."""
        if info["generation"] == 0 or threading.get_ident() != self.thread_id:
            return
        if stage == "start":
            self._around_collection = self.switch(self._collection)
        elif self.current is self._collection:
            self.switch(self._around_collection)

    @property
    def ran(self) -> bool:
        """Whether training has begun."""
        return self._started_s > 0

    @property
    def unseen(self) -> list[str]:
        """The parts of a step that could not be timed."""
        found = []
        seconds = self.blocks[-1].phase_s if self.blocks else self.seconds  # without the step that records the graph
        if self.replays and not any(seconds[phase] for phase in seconds if phases.is_backward(phase)):
            found.append("the parts of a step inside a CUDA graph")
        if self.core_wait.is_known is False:
            found.append("waiting for a CPU core (schedstat)")
        return found

    @property
    def wall_s(self) -> float:
        """Seconds of training so far."""
        return (self._clock() if self.running else self._stopped_s) - self._started_s

    def so_far(self) -> dict[str, float]:
        """Return the time by phase up to now, which adds up to ``wall_s``. Safe in any thread."""
        seconds = self.seconds
        if self.running:
            phase = self.current.phase
            seconds[phase] = seconds.get(phase, 0.0) + max(0.0, self.wall_s - sum(seconds.values()))
        return seconds

    def measure_gpu(self, gpu: torch.device) -> GpuTimeline:
        """Also measure with the GPU's own clock. The caller marks the parts of a step on the returned timeline."""
        self._gpu = GpuTimeline(
            gpu, self, self.as_own_work, lambda: self.times.left_out.update((self.steps + 1, self.steps + 2))
        )
        return self._gpu

    def note_checkpoint(self) -> None:
        """Count a checkpoint, unless there is another one of the same step."""
        self.checkpoints += self.steps != self._checkpoint_step
        self._checkpoint_step = self.steps

    def note_replay(self) -> None:
        """Count the replay of a CUDA graph."""
        self.replays += 1

    def gpu_idle(self) -> IdleTimes | None:
        """Return the GPU's idle time between sampled steps; ``None`` without samples."""
        facts = None if self._gpu is None else self._gpu.facts()
        return facts if facts is not None and facts.samples else None

    def watched_steps(self) -> WatchedSteps | None:
        """Return the lines at which the host waits for the GPU; ``None`` if no step was watched."""
        return None if self._gpu is None else self._gpu.syncs.facts()

    def as_own_work(self, function: Callable[..., object], *args: object, part: str = "") -> None:
        """Call the function and charge its time to this package, or to a named part of it."""
        if not self.running:
            function(*args)
            return
        around = self.switch(self.account(f"{phases.MONITORING}/{part}" if part else phases.MONITORING))
        try:
            function(*args)
        finally:
            self.switch(around)

    def begin_epoch(self) -> None:
        """Begin an epoch. Its first fetch counts as its start."""
        self.epochs += 1
        self.epoch_steps, self._steps_before = self.steps - self._steps_before, self.steps
        self._first_of_epoch = True
        self._next_sum = 0

    # The next two run in every step, so they inline `switch`.

    def begin_fetch(self) -> None:
        """Begin the wait for a batch, and thereby the next step."""
        if self._gpu is not None:
            self._gpu.begin_fetch()
        now_s = self._clock()
        around = self._around_fetch = self.current
        around.seconds += now_s - self.since_s
        self.since_s = now_s
        self._before_fetch_s = (around if around is self._epoch_start else self._data_loading).seconds
        if around is self._epoch_start:
            return  # length unknown: Lightning fetches the first batch while it creates the epoch's iterator
        self.steps += 1
        self.current = self._data_loading
        if self.steps > self.warm_up_steps:
            self.times.begin_step(self.steps, now_s)
        if self.steps >= self._next_sum:
            self._sum_up(now_s)
            self._before_fetch_s = self.current.seconds
        if now_s >= self.timeline.due_s:
            self.timeline.cut(now_s, self.seconds, self.steps - 1)

    def end_fetch(self) -> None:
        """End the wait for a batch."""
        now_s = self._clock()
        self.current.seconds += now_s - self.since_s
        # Excludes time charged to other phases, for example by `as_own_work`.
        self.last_fetch_s = self.current.seconds - self._before_fetch_s
        self.since_s, self.current = now_s, self._around_fetch
        if self._fetch_since_s is not None:
            thread_s, process_s, core_wait_s = self._fetch_since_s
            self._fetch_cpu_s = time.thread_time() - thread_s
            self._fetch_process_cpu_s = time.process_time() - process_s
            self._fetch_core_wait_s = self.core_wait.seconds() - core_wait_s
            self._fetch_since_s = None

    def end_of_data(self) -> None:
        """End a fetch that found no batch, and undo its step."""
        fetched = self.current
        self.end_fetch()
        self.steps -= 1
        fetched.seconds -= self.last_fetch_s  # it was spent ending the workers
        self._epoch_start.seconds += self.last_fetch_s

    def _sum_up(self, now_s: float) -> None:
        """Add up the steady steps since the last sum."""
        totals = StepBlock(
            steps=self.steps,
            wall_s=now_s,
            cpu_s=time.process_time(),
            core_wait_s=self.core_wait.seconds(),
            phase_s=self.seconds,
        )
        if self._sum_from is not None:
            passed = totals - self._sum_from
            self._open += replace(
                passed,
                data_loading_cpu_s=self._fetch_cpu_s * passed.steps,
                data_loading_core_wait_s=self._fetch_core_wait_s * passed.steps,
                # Excludes PyTorch's threads, which spin for a few milliseconds after a step.
                cpu_s=max(0.0, passed.cpu_s - self._fetch_process_cpu_s * passed.steps),
            )
            self._sum_from = None
            if self._open.steps >= self._steps_per_block:
                self.blocks.append(self._open)
                self._open = StepBlock()
                if len(self.blocks) == _MAX_BLOCKS:
                    self.blocks = [a + b for a, b in zip(self.blocks[::2], self.blocks[1::2], strict=True)]
                    self._steps_per_block *= 2
        if self._first_of_epoch:
            self._first_of_epoch = False
            self.current = self._epoch_start
            self._next_sum = self.steps + 1
        elif self.steps <= self.warm_up_steps:
            self._next_sum = self.warm_up_steps + 1
        else:
            self._sum_from = totals
            self._next_sum = self.steps + self._steps_per_block - self._open.steps
            self._fetch_since_s = time.thread_time(), time.process_time(), self.core_wait.seconds()


_runs = itertools.count()  # of this process


class Startup:
    """The time until the first step of a run is done: from the start of the process, or of a later run."""

    def __init__(self, clock: StepClock) -> None:
        self.parts_s: Mapping[str, float] = {}  # adds up to the whole; empty until the first step is done
        self._clock = clock
        self._began_s = self._checked_s = clock.now_s
        self._check_s = 0.0
        is_prompt = "ipykernel" in sys.modules or hasattr(sys, "ps1")  # where a person thinks between two cells
        self._own_code_s = None if next(_runs) or is_prompt else process_age_s()

    def begin_sanity_check(self) -> None:
        """Begin Lightning's validation before training."""
        self._checked_s = self._clock.now_s

    def end_sanity_check(self) -> None:
        """End it."""
        self._check_s = self._clock.now_s - self._checked_s

    def end(self, compilation_s: float) -> None:
        """Record the parts at the end of the first step, of which torch.compile took so long."""
        phase_s, total_s = self._clock.so_far(), self._clock.now_s - self._began_s
        step_s = sum(seconds for phase, seconds in phase_s.items() if phases.base_phase(phase) == phases.TRAINING_STEP)
        compilation_s = min(compilation_s, step_s)
        parts_s = {
            "setup": max(0.0, total_s - self._clock.wall_s - self._check_s),
            "sanity_check": self._check_s,
            "first_batch": phase_s.get(phases.EPOCH_START, 0.0) + phase_s.get(phases.DATA_LOADING, 0.0),
            "compilation": compilation_s,
            "first_step": step_s - compilation_s,
        }
        parts_s["other"] = max(0.0, total_s - sum(parts_s.values()))
        known = {"own_code": self._own_code_s or 0.0, **parts_s}
        self.parts_s = {name: seconds for name, seconds in known.items() if seconds}
