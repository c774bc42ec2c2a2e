"""Waiting for data: how much it costs, which kind of shortage it is, and which settings end it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from lightning_gpu_tools.advice.findings import MIN_CEILING, Finding, ceiling
from lightning_gpu_tools.advice.loader_plan import LoadCost, LoaderPlan, plan_loader
from lightning_gpu_tools.training.run_measurements import DATA_LOADING, LoaderSettings, RunMeasurements, settled
from lightning_gpu_tools.units import format_bytes, format_duration

# A choice: storage is the limit if the workers wait for it in more than 30 % of the looks at them, and compute less
# than half of the time. SageMaker's IOBottleneck rule asks for an I/O wait of 50 %, of a single process.
_STORAGE_WAIT = 0.30
_COMPUTING = 0.50
# A choice: cores are the limit if the workers compute, or want to, for 80 % of the time, and no core is free for them
# in 20 % of it. loadtune calls a CPU saturated at 85 %.
_RUNNABLE = 0.80
_DELAYED = 0.20
# A choice: if a batch lies ready before nine steps in ten, nobody waits for workers.
_READY = 0.90
# A choice: one worker is behind the others if, when its batch comes at last, half of all ordered batches lie ready.
_READY_OUT_OF_ORDER = 0.5
_MIN_LONG_WAITS = 5
# gpuprof's rule for a cold page cache: three times as much is read from storage in the first third of a run as in its
# last third, and the steps speed up; a choice: the wait falls to half.
_COLD_READS = 3.0
_COLD_WAIT = 0.5
_MIN_COLD_BLOCKS = 6
# A choice: a training process that computes for half of its wait is busy unpacking batches; else it would sleep.
_UNPACKING = 0.5
# To receive a batch of a single tensor took 2.3 ms on a slow machine, and nobody can change that. A choice: twice that.
_MIN_UNPACKING_S = 0.005
# A choice: less than 64 KiB a batch from storage is no reading of data.
_MIN_STORAGE_BYTES = 64 * 2**10


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wait:
    """The wait of the steady steps."""

    wait_s: float
    step_s: float
    share: float
    share_lower: float


def data_loading(run: RunMeasurements) -> Finding | None:
    """Return what waiting for data costs and what to change; ``None`` if it costs nothing."""
    wait = _measure(run)
    if wait.share <= 0:
        return None
    evidence: dict[str, float | str] = {
        "wait_ms_per_step": wait.wait_s * 1e3,
        "step_ms": wait.step_s * 1e3,
        "cores": run.host.cores,
    }
    if run.gpu_idle is not None:
        evidence["exposed_percent"] = 100 * run.exposed(DATA_LOADING)
    if run.loader is None:
        advice = "Load more batches in parallel: the loader is not a torch DataLoader, so its own settings decide."
    else:
        more, advice = _torch_loader(run, run.loader, wait)
        ready = run.loading is not None and (run.loading.ready_share or 0.0) >= _READY
        if wait.wait_s < _MIN_UNPACKING_S and (ready or more["kind"] == "main_process"):
            return None
        evidence |= more
    return Finding(
        cause="data_loading",
        share=wait.share,
        ceiling=ceiling(wait.share),
        ceiling_lower=ceiling(wait.share_lower),
        evidence=evidence,
        advice=advice,
    )


def _measure(run: RunMeasurements) -> _Wait:
    blocks = settled(run.blocks)
    waits_s = [block.data_loading_s / block.steps for block in blocks]
    steps_s = [(block.wall_s - block.paused_s) / block.steps for block in blocks]
    wait_s, step_s = median(waits_s), median(steps_s)
    paused_s = sum(run.phase_s.get(phase, 0.0) for phase in ("validation", "checkpoint", "epoch_start"))
    # A wait that overlaps GPU work costs nothing, so what the GPU's own times show counts, and never more than the
    # GPU's idle time.
    scale = max(0.0, 1 - paused_s / run.wall_s) * run.exposed(DATA_LOADING)
    share = min(wait_s / step_s * scale, run.idle_share) if step_s > 0 else 0.0
    shares = sorted(wait / step for wait, step in zip(waits_s, steps_s, strict=True) if step > 0)
    # Distribution-free 95 % lower bound of a median: the order statistic at n/2 - 0.98 sqrt(n).
    lower = shares[max(0, math.floor(len(shares) / 2 - 0.98 * math.sqrt(len(shares))))] if shares else 0.0
    return _Wait(wait_s=wait_s, step_s=step_s, share=share, share_lower=min(lower * scale, share))


def _torch_loader(run: RunMeasurements, loader: LoaderSettings, wait: _Wait) -> tuple[dict[str, float | str], str]:
    cost = _load_cost(run, loader, wait)
    plan = plan_loader(
        loader,
        cost,
        step_s=max(wait.step_s - wait.wait_s, 1e-6),
        host=run.host,
        cuda=run.on_gpu,
        step_cores=run.busy_cores,
    )
    gain = min(ceiling(wait.share), wait.step_s / plan.step_s)
    kind = _kind(run, loader, plan, cost, gain)
    evidence: dict[str, float | str] = {
        "kind": kind,
        "num_workers": loader.num_workers,
        "num_workers_needed": plan.workers_needed,
        "load_ms_per_batch": cost.wall_s * 1e3,
    }
    if cost.cpu_s is not None:
        evidence["load_cpu_ms_per_batch"] = cost.cpu_s * 1e3
    if kind == "too_few_workers":
        evidence |= {"predicted_speedup": gain, "advised_num_workers": plan.settings.num_workers}
    if run.loading is not None:
        evidence |= _seen(run)
    return evidence, _advice(kind, run, loader, plan, cost)


def _seen(run: RunMeasurements) -> dict[str, float | str]:
    seen = run.loading
    assert seen is not None
    named = {
        "ready_percent": None if seen.ready_share is None else 100 * seen.ready_share,
        "workers_runnable_percent": None if seen.runnable_share is None else 100 * seen.runnable_share,
        "workers_delayed_percent": None if seen.delayed_share is None else 100 * seen.delayed_share,
        "storage_wait_percent": None if seen.storage_wait_share is None else 100 * seen.storage_wait_share,
        "ready_out_of_order_percent": (
            None if seen.ready_out_of_order_share is None else 100 * seen.ready_out_of_order_share
        ),
        "early_storage_bytes_per_batch": seen.early_storage_bytes_per_batch,
        "late_storage_bytes_per_batch": seen.late_storage_bytes_per_batch,
    }
    return {name: value for name, value in named.items() if value is not None}


def _load_cost(run: RunMeasurements, loader: LoaderSettings, wait: _Wait) -> LoadCost:
    """Return what a batch costs one loader. Valid only while training waits: then the loader delivers all it can."""
    if loader.num_workers:
        # So many workers deliver one batch a step.
        return LoadCost(
            wall_s=loader.num_workers * wait.step_s, cpu_s=run.worker_cpu_s_per_batch, batch_bytes=run.batch_bytes
        )
    steps = sum(block.steps for block in run.blocks)
    cpu_s = sum(block.data_loading_cpu_s for block in run.blocks) / steps
    return LoadCost(wall_s=wait.wait_s, cpu_s=cpu_s, batch_bytes=run.batch_bytes)


def _kind(run: RunMeasurements, loader: LoaderSettings, plan: LoaderPlan, cost: LoadCost, gain: float) -> str:
    if _is_slow_worker(run, loader):
        return "slow_worker"
    if _is_cold_cache(run):
        return "cold_cache"
    if _is_io_bound(run, cost):
        return "io_bound"
    if _is_main_process(run, loader):
        return "main_process"
    if _has_no_free_core(run) or (plan.limited_by == "cores" and gain < MIN_CEILING):
        return "cpu_bound"
    if plan.settings.num_workers > loader.num_workers or plan.limited_by == "shm":
        return "too_few_workers"
    return "main_process"


def _is_slow_worker(run: RunMeasurements, loader: LoaderSettings) -> bool:
    seen = run.loading
    return (
        seen is not None
        and loader.num_workers > 1
        and seen.long_waits >= _MIN_LONG_WAITS
        and (seen.ready_out_of_order_share or 0.0) >= _READY_OUT_OF_ORDER
    )


def _is_cold_cache(run: RunMeasurements) -> bool:
    seen, third = run.loading, len(run.blocks) // 3
    if seen is None or seen.early_storage_bytes_per_batch is None or len(run.blocks) < _MIN_COLD_BLOCKS:
        return False
    if seen.early_storage_bytes_per_batch < max(
        _MIN_STORAGE_BYTES, _COLD_READS * (seen.late_storage_bytes_per_batch or 0.0)
    ):
        return False
    waits = [block.data_loading_s / block.steps for block in run.blocks]
    return median(waits[-third:]) <= _COLD_WAIT * median(waits[:third])


def _is_io_bound(run: RunMeasurements, cost: LoadCost) -> bool:
    seen = run.loading
    return (
        seen is not None
        and (seen.storage_wait_share or 0.0) > _STORAGE_WAIT
        and cost.cpu_s is not None
        and cost.cpu_s < _COMPUTING * cost.wall_s
    )


def _has_no_free_core(run: RunMeasurements) -> bool:
    seen = run.loading
    return seen is not None and (seen.runnable_share or 0.0) >= _RUNNABLE and (seen.delayed_share or 0.0) >= _DELAYED


def _is_main_process(run: RunMeasurements, loader: LoaderSettings) -> bool:
    wait_s = sum(block.data_loading_s for block in run.blocks)
    computing_s = sum(block.data_loading_cpu_s for block in run.blocks)
    return loader.num_workers > 0 and computing_s > _UNPACKING * wait_s


def _advice(kind: str, run: RunMeasurements, now: LoaderSettings, plan: LoaderPlan, cost: LoadCost) -> str:
    if kind == "slow_worker":
        return _slow_worker_advice(run, now)
    if kind == "cold_cache":
        seen = run.loading
        early = format_bytes(seen.early_storage_bytes_per_batch or 0.0) if seen is not None else "much"
        return (
            f"Early batches read {early} each from storage, later ones come from the page cache: nothing to change "
            "for the epochs that follow. To speed up the first one, copy the data to a local disk before."
        )
    if kind == "io_bound":
        share = (run.loading.storage_wait_share or 0.0) if run.loading is not None else 0.0
        return (
            f"The workers wait for storage in {100 * share:.0f} % of all looks at them: copy the data to a local disk, "
            "pack many small files into few large ones, or keep decoded samples in memory. More workers than cores "
            f"({run.host.cores:g}) can help, as long as the storage serves them in parallel: "
            f"{_settings_line(now, plan)}; NumWorkersFinder() measures it."
        )
    if kind == "cpu_bound":
        return (
            f"More workers will not help: a batch takes {format_duration(cost.cpu_s or 0)} of CPU time and this job "
            f"has {_cores(run)}. Make loading cheaper (store decoded or smaller samples, augment on the GPU) or get "
            "more cores."
        )
    if kind == "main_process":
        return (
            f"More workers will not help: unpacking what the {now.num_workers} workers send is the limit. Return few "
            "large tensors instead of many small ones or Python objects, and collate in the workers."
        )
    return _more_workers_advice(run, now, plan)


def _slow_worker_advice(run: RunMeasurements, now: LoaderSettings) -> str:
    share = (run.loading.ready_out_of_order_share or 0.0) if run.loading is not None else 0.0
    factor = 2 * (now.prefetch_factor or 2)
    return (
        f"More workers will not help: when a late batch comes, {100 * share:.0f} % of the batches ordered from the "
        f"other workers lie ready. Some samples, or one worker, take much longer than the rest: find them; set "
        f"prefetch_factor={factor} (now {now.prefetch_factor}) to bridge it, or in_order=False, which changes the "
        "order of batches."
    )


def _more_workers_advice(run: RunMeasurements, now: LoaderSettings, plan: LoaderPlan) -> str:
    if plan.limited_by == "shm" and plan.settings.num_workers <= now.num_workers:
        return (
            f"The step could use {plan.workers_needed} workers (now {now.num_workers}), but /dev/shm has no room for "
            "their batches: make it larger (docker run --shm-size=..., or --ipc=host)."
        )
    advice = f"In the DataLoader set {_settings_line(now, plan)}"
    if plan.settings.num_workers < plan.workers_needed and plan.limited_by == "cores":
        advice += f"; the step could use {plan.workers_needed} workers, but this job has {_cores(run)}"
    elif plan.settings.num_workers < plan.workers_needed and plan.limited_by == "shm":
        advice += f"; the step could use {plan.workers_needed} workers, but /dev/shm has no room for their batches"
    else:
        advice += "; beyond that the step itself is the limit"
    return advice + ". NumWorkersFinder() finds and applies them."


def _settings_line(now: LoaderSettings, plan: LoaderPlan) -> str:
    changes, kept = [], []
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory"):
        new, old = getattr(plan.settings, name), getattr(now, name)
        if new != old:
            changes.append(f"{name}={new} (now {old})")
        else:
            kept.append(f"{name}={old}")
    return ", ".join(changes) + (", keep " + ", ".join(kept) if changes and kept else ", ".join(kept))


def _cores(run: RunMeasurements) -> str:
    cores = f"{run.host.cores:g} cores"
    if run.host.cores_in_reach is not None and run.host.cores_in_reach < 0.9 * run.host.cores:
        cores += f", of which others leave it {run.host.cores_in_reach:.2g}"
    if run.host.local_ranks > 1:
        cores += f" for {run.host.local_ranks} ranks"
    return cores
