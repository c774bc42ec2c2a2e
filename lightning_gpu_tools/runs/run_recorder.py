"""A recorder of all facts about a run that the diagnosis needs."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import median_high
from typing import Any

import torch

from lightning_gpu_tools.advice.batch_size import largest_batch
from lightning_gpu_tools.background import SafeReader
from lightning_gpu_tools.gpus.metrics import GpuWindow, Timeline, mean_window
from lightning_gpu_tools.gpus.readings import not_none
from lightning_gpu_tools.gpus.watch import GpuWatch, Phase
from lightning_gpu_tools.host import resident_memory_bytes
from lightning_gpu_tools.loaders.settings import batch_bytes, first_tensor
from lightning_gpu_tools.memory.history import MemoryHistory
from lightning_gpu_tools.memory.readings import RankMemory
from lightning_gpu_tools.runs.ranks import Ranks, own_facts
from lightning_gpu_tools.runs.run import Run, Timer
from lightning_gpu_tools.runs.run_gpus import gpu_readings
from lightning_gpu_tools.runs.run_loaders import RunLoaders
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.cores import CoreUse, CoreUsers, in_reach
from lightning_gpu_tools.training.dataset import DatasetGrowth, path_of_data, storage_of
from lightning_gpu_tools.training.line_sampler import LineSampler
from lightning_gpu_tools.training.run_measurements import Quantity, RunMeasurements, SourceLine, StepBlock
from lightning_gpu_tools.training.source_lines import Compilations
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS

# Our defaults.
_WARM_UP_POLL_S = 0.4  # until the memory that the first steps fill, such as caches, is there
_SEARCH_EVERY_S = 1.0  # until the steps for the largest batch are recorded
_READ_EVERY_S, _MAX_READINGS = 0.25, 120  # of what may change along with the step time
_MAX_BATCHES = 101  # whose median is the usual size of a batch
_MAX_LOGGED_RANKS = 64  # eight machines with eight GPUs, each with a dozen metrics


class RunRecorder:
    """The facts that describe a run at any time; created when training starts and the loader is known.

    Ranks exchange facts under ``name`` in ``store``.
    """

    def __init__(self, run: Run, timer: Timer, watch: GpuWatch | None, *, name: str, store: Any) -> None:
        self.run = run
        self.reader = SafeReader()
        self.watch = watch  # of the GPUs of this node, in one of its processes
        self.own_gpu = None if run.gpu is None else gpu_readings([run.gpu])[0]
        self.largest_batch_size: int | None = None  # in samples, that fits on this rank's GPU
        self.batch_bytes: int | None = None  # of the first batch
        self._timer = timer
        self._clock = clock = timer.clock
        self._storage = self._checkpoint_storage = ""
        self._readings: dict[Quantity, Timeline] = {}
        self._batch_items: deque[int | None] = deque(maxlen=_MAX_BATCHES)  # of completed steps
        self.memory = timer.memory  # of this rank's GPU
        self.history = MemoryHistory(timer.memory, worker_pids=lambda: compat.worker_pids(run.iterator))
        self._dataset = DatasetGrowth(lambda: None if run.loader is None else run.loader.dataset)
        self.compilations = Compilations()
        self.lines = LineSampler(clock, timer.worker_lines, lambda: [one.loader for one in run.loaders])
        users = CoreUsers(
            clock.core_wait.seconds,
            lambda: self.ranks.pids_on_node() or (),
            lambda: {*timer.worker_lines.pids, *compat.worker_pids(run.iterator)},
        )
        self.cores = CoreUse(users, self.reader, local_ranks=run.place.local_ranks)
        self.loaders = RunLoaders(run, clock, self.lines.waits, self.reader, self.cores.began.children_cpu_s)
        self.ranks = Ranks(name, run.place, store, self.reader)
        self.ranks.exchange.publish(pid=os.getpid(), gpu=self.own_gpu and self.own_gpu.uuid)
        if self.memory is not None and watch is not None:
            self.memory.when_read = watch.note_memory

    def jobs(self) -> Iterator[tuple[str, Callable[[], float]]]:
        """Yield what to call in the background: a name, and a function that returns the seconds until the next call."""
        yield "Sampling the loader's workers", self.loaders.poll
        if self.run.place.rank == 0:
            yield "Sampling the memory", self._poll_memory
            yield "Measuring the dataset", self._dataset.poll
            yield "Sampling the use of the cores", self.cores.users.poll
            yield "Reading the compilations of torch.compile", self.compilations.poll
            yield "Reading the storage", self._read_storage
            yield "Sampling quantities that may grow", self._poll_readings
        if self.memory is not None:
            yield "The search for the largest batch", self.find_largest_batch

    @property
    def usual_batch_items(self) -> float | None:
        """Median number of elements in the first tensor of a batch, over the last completed steps."""
        items = [items for items in self._batch_items if items is not None]
        return float(median_high(items)) if items else None

    @property
    def unseen(self) -> list[str]:
        """The facts that could not be measured with this version of torch or Lightning, or not be read."""
        clock = self._clock
        found = [*self._timer.patches.missing, *(f"{what} ({why})" for what, why in sorted(self.reader.unread.items()))]
        if self.watch is not None and self.ranks.exchange.ranks < self.run.place.world_size:
            found.append("torch.distributed's store")
        found += clock.unseen
        if self._timer.rank_waits.unseen:
            found.append("waiting for other ranks within backward")
        if self.memory is not None and self.memory.failure is not None:
            found.append(f"torch's memory counters ({self.memory.failure!r})")
        return found

    # In the training thread, in every step

    def note_batch(self, batch: Any) -> None:
        """Record the size of this step's batch."""
        try:  # without `read`, which takes longer than this code
            self._clock.times.batch_items = None
            first = batch if isinstance(batch, torch.Tensor) else first_tensor(batch)
            self._clock.times.batch_items = None if first is None else first.numel()
            if self.batch_bytes is None:
                self.batch_bytes = batch_bytes(batch)
        except Exception as error:  # noqa: BLE001 - an odd batch must not stop measuring the rest
            self.reader.note_unread("the batch's size", error)

    def after_step(self) -> None:
        """Record the size of the batch, sample the loader's workers, and publish facts for other ranks if it is due."""
        self._batch_items.append(self._clock.times.batch_items)
        self.loaders.after_step()
        if self.ranks.exchange.wanted:
            self._clock.as_own_work(self.publish)

    # In the background

    def _poll_memory(self) -> float:
        return self.history.poll() if self._clock.steps > WARM_UP_STEPS else _WARM_UP_POLL_S

    def _read_storage(self) -> float:
        dataset = None if self.run.loader is None else self.run.loader.dataset
        self._storage = storage_of(path_of_data(dataset))
        self._checkpoint_storage = storage_of(self.run.checkpoint_folder)
        return math.inf

    def _poll_readings(self) -> float:
        """Read what may change along with the step time."""
        if self._clock.steps > self._clock.warm_up_steps:
            now: dict[Quantity, float | None] = {
                "batch_items": self._clock.times.batch_items,
                "lost_clock_percent": None if self.watch is None else self.watch.lost_clock_percent(),
                "resident_bytes": resident_memory_bytes(),
            }
            for name, value in now.items():
                if value is not None:
                    self._readings.setdefault(name, Timeline(_MAX_READINGS, 1.0)).add(self._clock.steps, value)
        return _READ_EVERY_S

    def find_largest_batch(self) -> float:
        """Find the largest batch that fits this rank's GPU, once, in any thread; return the seconds until the next try.

        Takes up to a second.
        """
        memory, loader = self.memory, self.loaders.settings
        if memory is None or memory.failure is not None:
            return math.inf
        steps = memory.recorded
        if len({step.step for step in steps}) < 2:
            return _SEARCH_EVERY_S
        # Otherwise the first dimension of a batch is not its samples.
        if loader is not None and loader.batch_size == steps[-1].batch_shape[0]:
            keeps_gradients = self.run.accumulate_grad_batches > 1
            self.largest_batch_size = largest_batch(
                steps, memory.known.room_bytes, self.batch_bytes or 0, keeps_gradients=keeps_gradients
            )
        return math.inf

    # With other ranks

    def publish(self, *, at_end: bool = False) -> None:
        """Publish this rank's speed; the first rank of every other node also publishes its GPUs."""
        if self.run.place.world_size == 1:
            return
        watch = self.watch
        facts = own_facts(self.run, self._timer, self._source_lines())
        facts["largest_batch_size"] = self.largest_batch_size
        if watch is not None and self.run.place.rank != 0:
            metrics, facts["troubles"] = watch.take_metrics()
            facts["metrics"] = metrics if self.run.place.world_size <= _MAX_LOGGED_RANKS else {}
            summaries = watch.summaries(at_end=at_end)
            facts["gpus"] = [asdict(replace(gpu, timelines={})) for gpu in summaries]
        memory = self.own_memory()
        if memory is not None:  # without the long part
            facts["memory"] = asdict(replace(memory, recorded=()))
        self.ranks.exchange.publish(**facts)

    def _source_lines(self) -> tuple[SourceLine, ...]:
        return self.reader.read("source lines", partial(self.lines.seen, self.loaders.workers.pids), ())

    def finish(self, timeout_s: float) -> list[str]:
        """Publish one last time, and on rank 0 wait for the others; return sentences about missing facts."""
        self.publish(at_end=True)
        return self.ranks.finish(timeout_s)

    def own_memory(self) -> RankMemory | None:
        """Return this rank's facts about GPU memory; ``None`` without a GPU, or if nothing could be counted."""
        return None if self.memory is None else self.reader.read("the GPU's memory", self._read_memory, None)

    def _read_memory(self) -> RankMemory | None:
        """Return this rank's counts with its GPU, and with the driver's samples if this process has them."""
        memory = None if self.memory is None else self.memory.facts()
        if memory is None or self.own_gpu is None:
            return None
        memory = replace(memory, gpu=(self.run.place.node, self.own_gpu.index, str(self.own_gpu.uuid)))
        if self.watch is None:
            return memory
        own_pids = self.watch.own_pids()
        pids = None if own_pids is None else tuple(sorted(own_pids))
        return replace(memory, samples=tuple(self.watch.noted_memory()), own_pids=pids)

    # All of it

    def _windows(self, phase: Phase = "training") -> Sequence[GpuWindow]:
        """Return the whole run so far of each GPU of this node that trains."""
        read = None if self.watch is None else partial(self.watch.trained_on, phase)
        return () if read is None else self.reader.read("the GPU's metrics", read, [])

    def measurements(self) -> RunMeasurements:
        """Return everything measured so far, in the training thread."""
        clock, run, read = self._clock, self.run, self.reader.read
        now = self.cores.latest()
        waits = clock.validation_waits
        phase_s = clock.so_far()
        loading, settings = self.loaders.loading(), self.loaders.settings
        steady = sum(clock.blocks, StepBlock())
        workers, knows_core_wait = 0 if settings is None else settings.num_workers, bool(clock.core_wait.is_known)
        core_facts = partial(self.cores.facts, now, steady, workers, loading)
        cores = read("the use of the cores", partial(core_facts, knows_core_wait=knows_core_wait), None)
        largest = (entry.get("largest_batch_size") for entry in self.ranks.exchange.entries())
        loader_began, loader_now, wait_share = self.loaders.followed()
        windows = self._windows()
        own_uuid = self.own_gpu.uuid if self.own_gpu is not None and len(run.gpus) > 1 else None
        gpu, own_gpu = mean_window(windows), mean_window([one for one in windows if one.uuid == own_uuid])
        return RunMeasurements(
            wall_s=sum(phase_s.values()),
            steps=max(1, clock.steps),
            epochs=max(1, clock.epochs),
            validations=clock.validations,
            checkpoints=clock.checkpoints,
            validation_batches=waits.batches,
            validation_start_s=waits.created_s,
            validation_wait_s=waits.fetched_s,
            validation_loaders=read("the validation loader's settings", lambda: run.validation_loaders, ()),
            validation_facts=run.validation_facts,
            phase_s=phase_s,
            blocks=tuple(clock.blocks),
            step_times=clock.times.facts(),
            host=in_reach(now.budget, cores),
            on_gpu=bool(run.gpus),
            utilization_percent=gpu.utilization_percent_mean,
            own_utilization_percent=own_gpu.utilization_percent_mean,
            validation_utilization_percent=mean_window(self._windows("validation")).utilization_percent_mean,
            loader=settings,
            loader_began=loader_began,
            loader_now=loader_now,
            loader_wait_share=wait_share,
            worker_cpu_s_per_batch=self.loaders.worker_cpu_s_per_batch(now.children_cpu_s, loading),
            batch_bytes=self.batch_bytes,
            loading=loading,
            storage=self._storage,
            checkpoint_storage=self._checkpoint_storage,
            cores=cores,
            gpu=gpu,
            gpu_idle=read("the GPU's idle time", clock.gpu_idle, None),
            memory=self.own_memory(),
            growth=tuple(self.history.alarms),
            watched=clock.watched_steps(),
            dataset_growth=[*self._dataset.grown, *self._timer.worker_lines.grown(self.loaders.workers.pids)],
            recompiled=read("the compilations of torch.compile", self.compilations.facts, None),
            lines=self._source_lines(),
            ranks=self.ranks.steps,
            precision=read("the precision", lambda: run.precision, None),
            matmul_precision=read("the precision of matrix products", compat.matmul_precision, None),
            spans=clock.timeline.spans(),
            readings={name: [value for _, value in one.points()] for name, one in self._readings.items()},
            log_every_n_steps=run.log_every_n_steps,
            accumulate_grad_batches=run.accumulate_grad_batches,
            epoch_steps=read("the length of an epoch", lambda: run.epoch_steps, None),
            largest_batch_size=min(not_none([self.largest_batch_size, *largest]), default=None),
            has_trainer=run.has_trainer,
            stage=run.stage,
            settings=read("the Trainer's settings", lambda: run.settings, {}),
            unseen=tuple(self.unseen),
        )
