"""Everything that the diagnosis is told of a fit, collected from the Trainer, its step clock, the host and the GPUs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import sampler
from lightning_gpu_tools.gpus.samples import GpuWindow
from lightning_gpu_tools.gpus.sharing import Sharing, share_out
from lightning_gpu_tools.gpus.utilization import weighted_mean
from lightning_gpu_tools.host import children_cpu_s, cores_in_reach, idle_cpu_s, read_host_budget
from lightning_gpu_tools.trainer.device_facts import device_facts, left_on_cpu
from lightning_gpu_tools.trainer.facts import (
    local_ranks,
    train_loader_settings,
    trainer_gpus,
    trains_on_gpu,
)
from lightning_gpu_tools.trainer.step_clock import StepClock
from lightning_gpu_tools.trainer.worker_watch import LONG_WAIT_S, WorkerWatch
from lightning_gpu_tools.training.phases import CALLBACK, DATA_LOADING, EPOCH_START, LOGGING
from lightning_gpu_tools.training.rank_exchange import RankExchange
from lightning_gpu_tools.training.run_measurements import GpuFacts, ProfiledSteps, RankStep, RunMeasurements, StepBlock


class RunRecorder:
    """Keeps, from the start of a fit on, what is needed to describe the fit at any later moment.

    Make it in ``on_train_start``, where the loader is known, and close it at the end.

    Args:
        trainer: Whose fit.
        clock: Its step clock.
        exchange: Where the ranks tell each other how fast they are, under ``own_step``.

    Attributes:
        batch_bytes: Size of one batch; ``None`` until somebody sets it.
        profile: A few steps under the profiler; ``None`` until somebody sets it.
    """

    def __init__(self, trainer: Trainer, clock: StepClock, exchange: RankExchange) -> None:
        self.batch_bytes: int | None = None
        self.profile: ProfiledSteps | None = None
        self._trainer = trainer
        self._clock = clock
        self._exchange = exchange
        self._began_s = time.perf_counter()
        self._own_cpu_s, self._children_cpu_s, self._idle_cpu_s = time.process_time(), children_cpu_s(), idle_cpu_s()
        self._local_ranks = local_ranks(trainer)
        self._on_gpu = trains_on_gpu(trainer)
        self._loader = train_loader_settings(trainer)
        self._loader_since = self._children_cpu_s, 0
        if self._loader is not None:
            ready = self._loader.num_workers * (self._loader.prefetch_factor or 0)
            clock.warm_up_steps = max(clock.warm_up_steps, 2 * ready)
        self._workers = WorkerWatch(trainer)
        self._next_look = 0
        self._own_pids: frozenset[int] | None = None
        self._gpus: sampler.Reader | None = None
        gpu_uuids = [gpu.uuid for gpu in trainer_gpus(trainer) if gpu.uuid is not None]
        if gpu_uuids and trainer.local_rank == 0:  # one process of a node is enough to look at its GPUs
            # Without a usable driver utilization is unknown; whoever shows the GPUs tells the user why.
            with contextlib.suppress(NvmlUnavailableError):
                self._gpus = sampler.subscribe(gpu_uuids)
        self._windows: list[GpuWindow] = []
        self._validation_windows: list[GpuWindow] = []
        exchange.tell(0, node=trainer.node_rank, pid=os.getpid())

    def after_step(self) -> None:
        """Look at the loader's workers if it is time; nearly always this does nothing."""
        if self._clock.last_fetch_s > LONG_WAIT_S:
            self._workers.after_long_wait()
        if self._clock.steps >= self._next_look:
            self._next_look = self._clock.steps + 10
            self._workers.before_fetch()
            self._workers.look(self._clock.steps)
            self._follow_the_loader()

    def _follow_the_loader(self) -> None:
        """Judge the loader by its present settings alone, if somebody has changed them (``NumWorkersFinder``)."""
        settings = train_loader_settings(self._trainer)
        if settings is not None and settings != self._loader:
            self._loader, self._loader_since = settings, (children_cpu_s(), self._clock.steps)
            self._clock.begin_anew()

    def enter(self, phase: sampler.Phase) -> None:
        """Keep what the GPUs do from here on apart from the other phase."""
        if self._gpus is not None:
            self._gpus.enter(phase)

    def close(self) -> None:
        """Let go of the sampler; nothing happens the second time."""
        if self._gpus is not None:
            self._read_gpus()
            self._gpus.close()
            self._gpus = None

    def _read_gpus(self) -> None:
        if self._gpus is not None:
            self._windows = list(self._gpus.so_far().values())
            self._validation_windows = list(self._gpus.so_far(phase="validation").values())

    def own_pids(self) -> frozenset[int] | None:
        """Return this job's processes on the node by the driver's numbers; ``None`` as long as they are unknown."""
        if self._own_pids is None:
            from lightning_gpu_tools.gpus import nvml  # only where there are GPUs: it imports pynvml

            node = self._trainer.node_rank
            mates = [facts["pid"] for facts in self._exchange.read(0) if facts["node"] == node]
            expected = max(1, self._exchange.ranks // max(1, self._trainer.num_nodes))
            if nvml.pids_are_ours() and len(mates) >= expected:
                self._own_pids = frozenset(mates)
        return self._own_pids

    def own_step(self) -> dict[str, Any] | None:
        """Return how long this rank works on a median steady step by itself, for the other ranks; ``None`` so far.

        Left out is what another rank can make it wait in: backward, the optimizer, and the Trainer's own work, in
        which Lightning's DDP asks all ranks for signals.
        """
        clock = self._clock
        if not clock.blocks:
            return None
        phase_s = {
            "data_loading": median(block.data_loading_s / block.steps for block in clock.blocks),
            "host_to_device_copy": median(block.host_to_device_copy_s / block.steps for block in clock.blocks),
            "forward": median(block.forward_s / block.steps for block in clock.blocks),
        }
        for phase, seconds in clock.seconds.items():
            group = phase.partition("/")[0]
            if group in (CALLBACK, LOGGING):
                phase_s[group] = phase_s.get(group, 0.0) + seconds / max(1, clock.steps)
        return {"own_s": sum(phase_s.values()), "phase_s": phase_s}

    def measurements(self) -> RunMeasurements:
        """Return everything measured so far."""
        clock, trainer = self._clock, self._trainer
        self._read_gpus()
        children_s = children_cpu_s()
        own_s = time.process_time() - self._own_cpu_s
        used_s = own_s + children_s - self._children_cpu_s
        elapsed_s = time.perf_counter() - self._began_s
        host = read_host_budget(local_ranks=self._local_ranks)
        used_or_idle = (self._local_ranks * used_s + idle_cpu_s() - self._idle_cpu_s) / elapsed_s
        workers = self._loader is not None and self._loader.num_workers > 0
        children_s_before, steps_before = self._loader_since
        return RunMeasurements(
            wall_s=clock.wall_s,
            steps=max(1, clock.steps),
            epochs=max(1, clock.epochs),
            phase_s=dict(clock.seconds),
            blocks=tuple(clock.blocks),
            host=replace(host, cores_in_reach=cores_in_reach(host.cores, used_or_idle)),
            on_gpu=self._on_gpu,
            utilization_percent=_utilization(self._windows),
            validation_utilization_percent=_utilization(self._validation_windows),
            loader=self._loader,
            worker_cpu_s_per_batch=(children_s - children_s_before) / max(1, clock.steps - steps_before)
            if workers
            else None,
            batch_bytes=self.batch_bytes,
            busy_cores=busy_cores(own_s, elapsed_s, clock.seconds, clock.blocks),
            loading=self._workers.facts(),
            gpu=self._gpu_facts() if self._on_gpu else None,
            gpu_idle=clock.gpu_idle(),
            profile=self.profile,
            ranks=_ranks(self._exchange.read(0)),
            precision=str(trainer.precision),
            matmul_precision=torch.get_float32_matmul_precision(),
            log_every_n_steps=trainer.log_every_n_steps,  # type: ignore[attr-defined]
            left_on_cpu=left_on_cpu(trainer.lightning_module) if self._on_gpu else (),
        )

    def _gpu_facts(self) -> GpuFacts:
        facts = device_facts(self._trainer)
        if not self._windows:
            return facts
        sharing = [share_out(window.processes, self.own_pids()) for window in self._windows]
        return replace(
            facts,
            sm_active_percent=_mean(window.sm_active_percent for window in self._windows),
            tensor_active_percent=_mean(window.tensor_active_percent for window in self._windows),
            thermal_throttled_percent=_mean(window.thermal_throttled_percent for window in self._windows),
            power_capped_percent=_mean(window.power_capped_percent for window in self._windows),
            held_clock_percent=_mean(window.held_clock_percent for window in self._windows),
            others_memory_bytes=_most(sharing, "others_memory_bytes"),
            others_utilization_percent=_most(sharing, "others_utilization_percent"),
        )


def busy_cores(cpu_s: float, elapsed_s: float, phase_s: Mapping[str, float], blocks: Sequence[StepBlock]) -> float:
    """Return how many cores a process keeps busy while it does not wait for data.

    Args:
        cpu_s: CPU time of all its threads.
        elapsed_s: Wall time in which it was spent.
        phase_s: Part of the wall time spent on each phase.
        blocks: Steady steps, of which it is known how much of a wait for data is the process's own loading.
    """
    waited_s = phase_s.get(DATA_LOADING, 0.0) + phase_s.get(EPOCH_START, 0.0)
    steady_s = sum(block.data_loading_s for block in blocks)
    loading_share = sum(block.data_loading_cpu_s for block in blocks) / steady_s if steady_s > 0 else 0.0
    working_s = elapsed_s - waited_s
    return max(0.0, cpu_s - loading_share * waited_s) / working_s if working_s > 0 else 1.0


def _utilization(windows: Sequence[GpuWindow]) -> float | None:
    observed = [one for one in windows if one.utilization_mean_percent is not None]
    percents = [one.utilization_mean_percent or 0.0 for one in observed]
    return weighted_mean(percents, [one.utilization_observed_s for one in observed])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _most(sharing: Sequence[Sharing], field: str) -> Any:
    known = [value for one in sharing if (value := getattr(one, field)) is not None]
    return max(known, default=None)


def _ranks(told: Sequence[Mapping[str, Any]]) -> tuple[RankStep, ...]:
    found = [
        RankStep(rank=facts["rank"], node=facts["node"], **facts["own_step"])
        for facts in told
        if facts.get("own_step") is not None
    ]
    return tuple(found) if len(found) > 1 else ()
