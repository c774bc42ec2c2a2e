"""A recorder of all facts about a run that the diagnosis needs."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from statistics import median_high
from time import perf_counter  # by name: a program's tests may replace the functions of `time`
from typing import Any, NamedTuple, TypeVar

import torch

from lightning_gpu_tools.advice.batch_size import largest_batch
from lightning_gpu_tools.gpus.metrics import GpuWindow, mean_window
from lightning_gpu_tools.gpus.readings import not_none, weighted_mean
from lightning_gpu_tools.gpus.sampler import Phase
from lightning_gpu_tools.gpus.timeline import Timeline
from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.host import (
    HostBudget,
    affinity_cores,
    children_cpu_s,
    cores_in_reach,
    idle_cpu_s,
    read_host_budget,
    resident_memory_bytes,
)
from lightning_gpu_tools.loaders.settings import batch_bytes, batch_shape, first_tensor
from lightning_gpu_tools.runs.contexts import Contexts
from lightning_gpu_tools.runs.rank_entries import Received, own_step, own_waits, received
from lightning_gpu_tools.runs.run import Run, Timer, gpu_readings
from lightning_gpu_tools.runs.run_loaders import RunLoaders
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.compilations import Compilations
from lightning_gpu_tools.training.cores import CoreUsers
from lightning_gpu_tools.training.line_sampler import LineSampler
from lightning_gpu_tools.training.phases import RANK_WAIT, base_phase
from lightning_gpu_tools.training.run_measurements import (
    CoreFacts,
    HeldContext,
    LoaderSettings,
    Quantity,
    RunMeasurements,
    SourceLine,
    StepBlock,
)
from lightning_gpu_tools.training.stacks import ThreadTimes, added_times, thread_times
from lightning_gpu_tools.training.step_clock import StepClock
from lightning_gpu_tools.training.storage import Storage, path_of_data, storage_of
from lightning_gpu_tools.training.worker_watch import LONG_WAIT_S, WorkerWatch
from lightning_gpu_tools.units import printable

_POLL_EVERY_STEPS, _POLL_EVERY_S = 10, 0.05  # our defaults: of the workers and the loader's settings, which takes 40 us
_SEARCH_EVERY_S = 1.0  # our default: until the steps for the largest batch are recorded
_READ_EVERY_S, _MAX_READINGS = 0.25, 120  # our defaults: of what may change along with the step time
_MAX_LINES = 8  # our default: that a rank sends to rank 0
_MAX_BATCHES = 101  # our default: whose median is the usual size of a batch

_Fact = TypeVar("_Fact")


class Facts:
    """A reader of single facts, for any thread: one that cannot be read is left out, and listed in the report."""

    def __init__(self) -> None:
        self.unread: dict[str, str] = {}  # names of facts that could not be read, and the reason

    def read(self, what: str, read: Callable[[], _Fact], missing: _Fact) -> _Fact:
        """Return a fact, or ``missing`` if reading it raises an error (a new torch, a driver, an odd batch)."""
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - the rest can still be measured
            self.note_unread(what, error)
            return missing

    def note_unread(self, what: str, error: Exception) -> None:
        """Record a fact that could not be read."""
        # As text, because its frames would keep a batch; with this function, because str(error) may raise.
        self.unread[what] = printable("".join(traceback.format_exception_only(error)).strip(), 200)


class HostReading(NamedTuple):
    """The state of the host at one moment; CPU times are counters."""

    at_s: float  # by perf_counter
    budget: HostBudget
    own_cpu_s: float
    children_cpu_s: float | None
    idle_cpu_s: float | None  # while its cores were idle
    threads: dict[int, ThreadTimes]  # of this process


class RunRecorder:
    """The facts that describe a run at any time; created when training starts and the loader is known."""

    def __init__(self, run: Run, clock: StepClock, timer: Timer, gpus: GpuWatch | None, core_users: CoreUsers) -> None:
        self.run = run
        self.gpus = gpus
        self.memory = timer.memory  # of this rank's GPU
        self.largest_batch_size: int | None = None  # in samples, that fits there
        self.batch_bytes: int | None = None  # of the first batch
        self.core_users = core_users
        self.lines = LineSampler(clock, timer.worker_lines, lambda: [one.loader for one in run.loaders])
        self.compilations = Compilations()
        self.facts = Facts()
        self._readings: dict[Quantity, Timeline] = {}
        self._clock = clock
        self._rank_waits = timer.rank_waits
        self._received = Received()
        self._contexts = Contexts(run)
        self._local_ranks = run.place.local_ranks
        self._began = self.read_host()
        self._on_gpu = bool(run.gpus)
        self._loaders = RunLoaders(run, self.lines.waits, self.facts.read)
        self._loader_since = self._began.children_cpu_s, 0  # the children's CPU time, and the step
        clock.ready_batches = self._loaders.ready_batches
        clock.warm_up_steps = max(clock.warm_up_steps, 2 * clock.ready_batches)
        self._workers = WorkerWatch(lambda: run.iterator)
        self._storage: Storage | None = None  # of the dataset
        self._checkpoint_storage: Storage | None = None
        self._next_poll, self._next_poll_s = 0, 0.0  # step, and time by the clock
        self._batch_items: deque[int | None] = deque(maxlen=_MAX_BATCHES)  # of completed steps

    @property
    def usual_batch_items(self) -> float | None:
        """Median number of elements in the first tensor of a batch, over the last completed steps."""
        items = not_none(self._batch_items)
        return float(median_high(items)) if items else None

    @property
    def unseen(self) -> list[str]:
        """The facts that could not be read, including those about the loader's workers."""
        has_workers = self.loader is not None and self.loader.num_workers
        unread = [f"{what} ({why})" for what, why in sorted(self.facts.unread.items())]
        return [*unread, *sorted((has_workers and self._workers.unseen) or ())]

    @property
    def has_compiled(self) -> bool:
        """Whether torch.compile has compiled anything."""
        return self.facts.read("the compilations of torch.compile", self.compilations.facts, None) is not None

    def note_batch(self, batch: Any) -> None:
        """Record the size of this step's batch."""
        try:  # without `read`, which takes longer than this code
            self._clock.times.batch_items = None
            first = batch if isinstance(batch, torch.Tensor) else first_tensor(batch)
            self._clock.times.batch_items = None if first is None else first.numel()
            if self.memory is not None and self.memory.wants_batch:
                self.memory.note_batch(batch_shape(first))
            if self.batch_bytes is None:
                self.batch_bytes = batch_bytes(batch)
        except Exception as error:  # noqa: BLE001 - an odd batch must not stop measuring the rest
            self.facts.note_unread("the batch's size", error)

    def after_step(self) -> None:
        """Record the size of the batch, and sample the loader's workers if it is due."""
        self._batch_items.append(self._clock.times.batch_items)
        if self._clock.last_fetch_s > LONG_WAIT_S:
            self.facts.read("the loader's workers", self._workers.after_long_wait, None)
        if self._clock.steps >= self._next_poll and self._clock.since_s >= self._next_poll_s:
            self._next_poll = self._clock.steps + _POLL_EVERY_STEPS
            self._next_poll_s = self._clock.since_s + _POLL_EVERY_S
            self.facts.read("the loader's workers", partial(self._workers.poll, self._clock.steps), None)
            self._follow_loader()

    def poll_worker_threads(self) -> float:
        """Poll the threads of the loader's workers, and return the seconds until the next poll."""
        return self.facts.read("the threads of the loader's workers", self._workers.poll_threads, math.inf)

    def read_storage(self) -> float:
        """Read the file systems of the dataset and of checkpoints, in any thread, once."""
        read, run = self.facts.read, self.run
        dataset = None if run.loader is None else run.loader.dataset
        self._storage = read("the storage of the dataset", lambda: storage_of(path_of_data(dataset)), None)
        self._checkpoint_storage = read("the storage of checkpoints", lambda: storage_of(run.checkpoint_folder), None)
        return math.inf

    def poll_readings(self) -> float:
        """Read what may change along with the step time, and return the seconds until the next poll."""
        if self._clock.steps > self._clock.warm_up_steps:
            now: dict[Quantity, float | None] = {
                "batch_items": self._clock.times.batch_items,
                "lost_clock_percent": None if self.gpus is None else self.gpus.lost_clock_percent(),
                "resident_bytes": resident_memory_bytes(),
            }
            for name, value in now.items():
                if value is not None:
                    self._readings.setdefault(name, Timeline(_MAX_READINGS, 1.0)).add(self._clock.steps, value)
        return _READ_EVERY_S

    @property
    def loader(self) -> LoaderSettings | None:
        """The settings of the training loader, or of the slowest one of several, if it is torch's."""
        return self._loaders.settings

    def _follow_loader(self) -> None:
        is_new = self._loaders.follow()
        if is_new == "another":
            pids, self._workers = self._workers.pids, WorkerWatch(lambda: self.run.iterator)
            self._workers.pids = pids
        elif is_new == "changed":  # when NumWorkersFinder has changed the settings, only the new ones count
            self._loader_since = self.facts.read("the workers' CPU time", children_cpu_s, None), self._clock.steps
            self._workers.unseen = None
            self._clock.ready_batches = self._loaders.ready_batches
            self._clock.begin_anew()

    def own_entry(self) -> dict[str, Any]:
        """Return the facts about this rank that others need, in the training thread."""
        clock, waits, workers, nothing = self._clock, self._rank_waits, self._workers, tuple[SourceLine, ...]()
        seen = self.facts.read("source lines", partial(self.lines.seen, workers.pids), nothing)
        own = (one for one in seen if base_phase(one.phase) != RANK_WAIT)
        return {
            "own_step": own_step(self.run, clock, waits),
            "waits": own_waits(self.run, clock, waits),
            "lines": [asdict(one) for one in islice(own, _MAX_LINES)],
            "largest_batch_size": self.largest_batch_size,
            "contexts": [*map(asdict, self.own_contexts())],
        }

    def own_contexts(self) -> tuple[HeldContext, ...]:
        """Return this rank's CUDA contexts, in the training thread."""
        return self.facts.read("CUDA contexts", self._contexts.read, ())

    def contexts(self) -> tuple[HeldContext, ...]:
        """Return the CUDA contexts of all ranks, as far as received."""
        return (*self.own_contexts(), *self._received.others_contexts)

    def receive(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Process the entries of all ranks, in any thread."""
        self._received = received(entries, self.run.place.rank)

    def read_host(self) -> HostReading:
        """Read the state of the host, in any thread; takes some milliseconds."""
        read, ranks = self.facts.read, self._local_ranks
        without_limit = HostBudget(
            cores=os.cpu_count() or 1, memory_available_bytes=sys.maxsize, shm_free_bytes=None, local_ranks=ranks
        )
        return HostReading(
            at_s=perf_counter(),
            budget=read("the host's cores and memory", partial(read_host_budget, local_ranks=ranks), without_limit),
            own_cpu_s=time.process_time(),
            children_cpu_s=read("the workers' CPU time", children_cpu_s, None),
            idle_cpu_s=read("the idle time of the cores", idle_cpu_s, None),
            threads=read("the runnable threads", thread_times, {}),
        )

    def measurements(self, now: HostReading | None = None) -> RunMeasurements:
        """Return everything measured so far, in the training thread; ``now`` may come from another thread."""
        clock, run, memory, read = self._clock, self.run, self.memory, self.facts.read
        waits = clock.validation_waits
        now = now or self.read_host()
        used, idle = self._used_and_idle(now)
        children = self.core_users.children
        in_reach = None
        if used is not None and idle is not None:
            of_training = used - (0.0 if children is None else children.cores)
            in_reach = cores_in_reach(now.budget.cores, of_training + idle)
        worker_s = None
        if self.loader is not None and self.loader.num_workers:
            children_s_before, steps_before = self._loader_since
            worker_s = _per(now.children_cpu_s, children_s_before, max(1, clock.steps - steps_before))
        phase_s = clock.so_far()
        loader_began, loader_now, wait_share = self._loaders.followed()
        loading = read("the loader's workers", self._workers.facts, None)
        if worker_s is not None and loading is not None and loading.worker_cores is not None:  # others may be children
            assert self.loader is not None
            worker_s = min(
                worker_s, self.loader.num_workers * loading.worker_cores * clock.wall_s / max(1, clock.steps)
            )

        windows, in_validation = self._windows("training"), self._windows("validation")
        return RunMeasurements(
            wall_s=sum(phase_s.values()),
            steps=max(1, clock.steps),
            epochs=max(1, clock.epochs),
            validations=clock.validations,
            checkpoints=clock.checkpoints,
            validation_batches=waits.batches,
            validation_start_s=waits.created_s if run.forks_for_validation else waits.created_s + waits.first_s,
            validation_wait_s=waits.others_s + waits.first_s if run.forks_for_validation else waits.others_s,
            validation_loaders=read("the validation loader's settings", lambda: run.validation_loaders, ()),
            validation_facts=run.validation_facts,
            phase_s=phase_s,
            blocks=tuple(clock.blocks),
            step_times=clock.times.facts(),
            host=replace(now.budget, cores_in_reach=in_reach),
            on_gpu=self._on_gpu,
            utilization_percent=_utilization(windows),
            own_utilization_percent=read("the GPU's utilization", partial(self._own_utilization, windows), None),
            validation_utilization_percent=_utilization(in_validation),
            loader=self.loader,
            loader_began=loader_began,
            loader_now=loader_now,
            loader_wait_share=wait_share,
            worker_cpu_s_per_batch=worker_s,
            batch_bytes=self.batch_bytes,
            loading=loading,
            storage=self._storage,
            checkpoint_storage=self._checkpoint_storage,
            cores=read("the use of the cores", partial(self._core_facts, now), None),
            gpu=mean_window(windows) if self._on_gpu else None,
            compute_capability=read("the GPU's properties", partial(torch.cuda.get_device_capability, run.device), None)
            if run.device.type == "cuda"
            else None,
            gpu_idle=read("the GPU's idle time", clock.gpu_idle, None),
            memory=None if memory is None else read("the GPU's memory", memory.facts, None),
            watched=clock.watched_steps(),
            replays_per_step=clock.replays / max(1, clock.steps),
            recompiled=read("the compilations of torch.compile", self.compilations.facts, None),
            lines=read("source lines", partial(self.lines.seen, self._workers.pids), ()),
            ranks=self._received.ranks,
            contexts=self.contexts(),
            precision=read("the precision", lambda: run.precision, None),
            matmul_precision=read("the precision of matrix products", compat.matmul_precision, None),
            spans=clock.timeline.spans(),
            readings={name: [value for _, value in one.points()] for name, one in self._readings.items()},
            log_every_n_steps=run.log_every_n_steps,
            accumulate_grad_batches=run.accumulate_grad_batches,
            epoch_steps=read("the length of an epoch", lambda: run.epoch_steps, None),
            largest_batch_size=read("the largest batch that fits", self._largest_on_all_ranks, None),
            has_trainer=run.has_trainer,
            stage=run.stage,
        )

    def _windows(self, phase: Phase) -> Sequence[GpuWindow]:
        gpus, nothing = self.gpus, tuple[GpuWindow, ...]()
        return (
            nothing if gpus is None else self.facts.read("the GPU's metrics", lambda: gpus.trained_on(phase), nothing)
        )

    def _own_utilization(self, windows: Sequence[GpuWindow]) -> float | None:
        if self.run.gpu is None or len(self.run.gpus) == 1:
            return None
        (own,) = gpu_readings([self.run.gpu])
        return _utilization([window for window in windows if window.uuid == own.uuid])

    def _used_and_idle(self, now: HostReading) -> tuple[float | None, float | None]:
        """Return the mean numbers of this job's cores that it used, and that were idle."""
        began, elapsed_s = self._began, now.at_s - self._began.at_s
        by_workers = _per(now.children_cpu_s, began.children_cpu_s, elapsed_s)
        by_this = (now.own_cpu_s - began.own_cpu_s) / elapsed_s
        used = None if by_workers is None else self._local_ranks * (by_this + by_workers)
        return used, _per(now.idle_cpu_s, began.idle_cpu_s, elapsed_s)

    def _core_facts(self, now: HostReading) -> CoreFacts | None:
        began, elapsed_s, is_known = self._began, now.at_s - self._began.at_s, self._clock.knows_core_wait
        used, idle = self._used_and_idle(now)
        if used is None or idle is None:
            return None
        affinity, steady = affinity_cores(), sum(self._clock.blocks, StepBlock())
        loading, workers = self._workers.facts(), 0 if self.loader is None else self.loader.num_workers
        runnable = sum(added_times(began.threads, now.threads)) / elapsed_s + workers * (
            loading.runnable_threads or 0.0
        )
        return CoreFacts(
            wait_share=steady.core_wait_s / steady.wall_s if steady.steps and is_known else None,
            own_cores=used,
            others_cores=max(0.0, affinity - used - idle),
            affinity_cores=affinity,
            machine_cores=os.cpu_count() or 1,
            runnable_threads=self._local_ranks * runnable,
            torch_threads=torch.get_num_threads(),
            other=self.core_users.other,
            children=self.core_users.children,
        )

    def find_largest_batch(self) -> float:
        """Find the largest batch that fits this rank's GPU, once, in any thread; return the seconds until the next try.

        Takes up to a second.
        """
        recorded = None if self.memory is None else self.memory.recorded
        if self.memory is None or self.memory.failure is not None:
            return math.inf
        if recorded is None or len({one.step for one in recorded.steps}) < 2:
            return _SEARCH_EVERY_S
        # Otherwise the first dimension of a batch is not its samples.
        if self.loader is not None and self.loader.batch_size == recorded.steps[-1].batch_shape[0]:
            keeps_gradients = self.run.accumulate_grad_batches > 1
            found = largest_batch(recorded, recorded.room_bytes, self.batch_bytes or 0, keeps_gradients=keeps_gradients)
            self.largest_batch_size = found.size
        return math.inf

    def _largest_on_all_ranks(self) -> int | None:
        if not self._on_gpu:
            return None
        return min(not_none([self.largest_batch_size, *self._received.batch_sizes]), default=None)


def _per(now_s: float | None, before_s: float | None, amount: float) -> float | None:
    """Return the growth of a counter per unit of ``amount``; ``None`` if the counter cannot be read."""
    return None if now_s is None or before_s is None else (now_s - before_s) / amount


def _utilization(windows: Sequence[GpuWindow]) -> float | None:
    observed = [one for one in windows if one.utilization_percent_mean is not None]
    percents = [one.utilization_percent_mean or 0.0 for one in observed]
    return weighted_mean(percents, [one.utilization_observed_s for one in observed])
