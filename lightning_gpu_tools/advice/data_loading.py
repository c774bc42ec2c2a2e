"""Waiting for data: what it costs, what kind of shortage it is, and which settings end it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from lightning_gpu_tools.advice.findings import MIN_CEILING, Finding, ceiling
from lightning_gpu_tools.advice.loader_plan import LoadCost, LoaderPlan, plan_loader
from lightning_gpu_tools.advice.loader_trials import BY_THE_FINDER
from lightning_gpu_tools.advice.noise import median_interval
from lightning_gpu_tools.training.phases import DATA_LOADING, PAUSES
from lightning_gpu_tools.training.run_measurements import (
    LoaderSettings,
    LoadingFacts,
    RunMeasurements,
    settled,
)
from lightning_gpu_tools.units import format_bytes, format_duration

# Our defaults: storage is the limit if the workers wait for it in more than 30 % of the polls and compute less than
# half of the time. SageMaker's IOBottleneck rule asks for an I/O wait of 50 %, of a single process.
_STORAGE_WAIT = 0.30
_COMPUTING = 0.50
# Our defaults: cores are the limit if the workers are runnable for 80 % of the time, and find no free core in 20 % of
# it. loadtune calls a CPU saturated at 85 %.
_RUNNABLE = 0.80
_DELAYED = 0.20
# Our default: if a batch is ready before nine steps in ten, nothing waits for the workers.
_READY = 0.90
# Our defaults: one worker lags if, when its batch arrives at last, half of all prefetched batches are ready; over at
# least five such waits.
_READY_OUT_OF_ORDER = 0.5
_MIN_LONG_WAITS = 5
# gpuprof's rule for a cold page cache: the first third of a run reads three times as much from storage as the last
# third, and the steps speed up. Our default: the wait falls to half.
_COLD_READS = 3.0
_COLD_WAIT = 0.5
_MIN_COLD_BLOCKS = 6
# Our default: a training process that computes for half of its wait is unpacking batches; otherwise it would sleep.
_UNPACKING = 0.5
# Receiving a batch of one tensor took 2.3 ms on a slow machine, and no setting changes that. Our default: twice that.
_MIN_UNPACKING_S = 0.005
# Receiving a worker's batch of one or two small tensors took the training process 0.5 to 2 ms, on two cores. Where the
# process slept while it waited, its caches went cold, and a step that no longer follows a sleep wins as much.
_RECEIVE_S = 0.001
# Our default: less than 64 KiB per batch from storage is not reading data.
_MIN_STORAGE_BYTES = 64 * 2**10


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wait:
    """The wait in the steady steps."""

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
    bound = ceiling(wait.share)
    if run.loader is None:
        advice = (
            "The loader is not a torch DataLoader: use its own settings to load in parallel, or to cache what it "
            "computes for each batch."
        )
    else:
        seen = run.loading or LoadingFacts()
        more, advice, bound = _torch_loader(run, run.loader, seen, wait)
        if wait.wait_s < _MIN_UNPACKING_S and ((seen.ready_share or 0.0) >= _READY or more["kind"] == "main_process"):
            return None
        evidence |= more
    return Finding(
        cause="data_loading",
        share=wait.share,
        ceiling=bound,
        ceiling_lower=min(ceiling(wait.share_lower), bound),
        evidence=evidence,
        advice=advice,
    )


def _measure(run: RunMeasurements) -> _Wait:
    blocks = settled(run.blocks)
    wait_s = median(block.data_loading_s / block.steps for block in blocks)
    step_s = median(block.step_s for block in blocks)
    paused_s = sum(run.phase_s.get(phase, 0.0) for phase in PAUSES)
    # A wait that overlaps GPU work costs nothing. So what the GPU's own times show counts, and never more than the
    # GPU's idle time.
    scale = max(0.0, 1 - paused_s / run.wall_s) * run.exposed(DATA_LOADING)
    share = min(wait_s / step_s * scale, run.idle_share) if step_s > 0 else 0.0
    shares = [block.data_loading_s / block.steps / block.step_s for block in blocks if block.step_s > 0]
    lower, _ = median_interval(shares) or (min(shares, default=0.0), 1.0)
    return _Wait(wait_s=wait_s, step_s=step_s, share=share, share_lower=min(lower * scale, share))


def _torch_loader(
    run: RunMeasurements, loader: LoaderSettings, seen: LoadingFacts, wait: _Wait
) -> tuple[dict[str, float | str], str, float]:
    """Return evidence, advice, and the most that following it can speed training up."""
    cost = _load_cost(run, loader, wait)
    step_s = max(wait.step_s - wait.wait_s, 1e-6)
    step_cpu_s = min(run.busy_cores, run.host.cores) * step_s
    plan = plan_loader(loader, cost, step_s=step_s, host=run.host, cuda=run.on_gpu, step_cores=run.busy_cores)
    computes = cost.cpu_s is None or cost.cpu_s >= _COMPUTING * cost.wall_s
    saved_s = wait.step_s - plan.step_s - (_RECEIVE_S if computes and not loader.num_workers else 0.0)
    speedup = ceiling(wait.share * min(1.0, max(0.0, saved_s / wait.wait_s)))
    kind = _kind(run, loader, seen, plan, cost, speedup)
    evidence: dict[str, float | str] = {
        "kind": kind,
        "num_workers": loader.num_workers,
        "num_workers_needed": plan.workers_needed,
        "load_ms_per_batch": cost.wall_s * 1e3,
        "step_cpu_ms": step_cpu_s * 1e3,
    }
    if cost.cpu_s is not None:
        evidence["load_cpu_ms_per_batch"] = cost.cpu_s * 1e3
    if kind == "too_few_workers":
        evidence["advised_num_workers"] = plan.settings.num_workers
    # Other advice may end the wait altogether.
    bound = speedup if kind == "too_few_workers" and plan.limited_by != "shm" else ceiling(wait.share)
    advice = _advice(kind, run, loader, seen, plan, _cpu_times(run, cost.cpu_s or 0.0, step_cpu_s))
    return evidence | _evidence_of_workers(seen), advice, bound


def _evidence_of_workers(seen: LoadingFacts) -> dict[str, float | str]:
    shares = {
        "ready_percent": seen.ready_share,
        "workers_runnable_percent": seen.runnable_share,
        "workers_delayed_percent": seen.delayed_share,
        "storage_wait_percent": seen.storage_wait_share,
        "ready_out_of_order_percent": seen.ready_out_of_order_share,
    }
    sizes = {
        "early_storage_bytes_per_batch": seen.early_storage_bytes_per_batch,
        "late_storage_bytes_per_batch": seen.late_storage_bytes_per_batch,
    }
    percents = {name: 100 * share for name, share in shares.items() if share is not None}
    return {**percents, **{name: size for name, size in sizes.items() if size is not None}}


def _load_cost(run: RunMeasurements, loader: LoaderSettings, wait: _Wait) -> LoadCost:
    """Return what a batch costs one loader. Valid only while training waits: then the loader delivers all it can."""
    if loader.num_workers:
        # All workers together deliver one batch per step.
        return LoadCost(
            wall_s=loader.num_workers * wait.step_s, cpu_s=run.worker_cpu_s_per_batch, batch_bytes=run.batch_bytes
        )
    steps = sum(block.steps for block in run.blocks)
    cpu_s = sum(block.data_loading_cpu_s for block in run.blocks) / steps
    return LoadCost(wall_s=wait.wait_s, cpu_s=cpu_s, batch_bytes=run.batch_bytes)


def _kind(
    run: RunMeasurements, loader: LoaderSettings, seen: LoadingFacts, plan: LoaderPlan, cost: LoadCost, speedup: float
) -> str:
    if (
        loader.num_workers > 1
        and seen.long_waits >= _MIN_LONG_WAITS
        and (seen.ready_out_of_order_share or 0.0) >= _READY_OUT_OF_ORDER
    ):
        return "slow_worker"
    if _is_cold_cache(run, seen):
        return "cold_cache"
    if (seen.storage_wait_share or 0.0) > _STORAGE_WAIT and (
        cost.cpu_s is not None and cost.cpu_s < _COMPUTING * cost.wall_s
    ):
        return "io_bound"
    if _is_unpacking(run, loader):
        return "main_process"
    has_no_free_core = (seen.runnable_share or 0.0) >= _RUNNABLE and (seen.delayed_share or 0.0) >= _DELAYED
    if has_no_free_core or (plan.limited_by == "cores" and speedup < MIN_CEILING):
        return "cpu_bound"
    if plan.settings.num_workers > loader.num_workers or plan.limited_by == "shm":
        return "too_few_workers"
    return "main_process"


def _is_cold_cache(run: RunMeasurements, seen: LoadingFacts) -> bool:
    early, late, third = seen.early_storage_bytes_per_batch, seen.late_storage_bytes_per_batch, len(run.blocks) // 3
    if early is None or len(run.blocks) < _MIN_COLD_BLOCKS:
        return False
    if early < max(_MIN_STORAGE_BYTES, _COLD_READS * (late or 0.0)):
        return False
    waits = [block.data_loading_s / block.steps for block in run.blocks]
    return median(waits[-third:]) <= _COLD_WAIT * median(waits[:third])


def _is_unpacking(run: RunMeasurements, loader: LoaderSettings) -> bool:
    wait_s = sum(block.data_loading_s for block in run.blocks)
    computing_s = sum(block.data_loading_cpu_s for block in run.blocks)
    return loader.num_workers > 0 and computing_s > _UNPACKING * wait_s


def _advice(
    kind: str, run: RunMeasurements, now: LoaderSettings, seen: LoadingFacts, plan: LoaderPlan, cpu_times: str
) -> str:
    if kind == "slow_worker":
        return (
            "More workers will not help. When a late batch arrives, "
            f"{100 * (seen.ready_out_of_order_share or 0.0):.0f} % of the batches prefetched by the other workers are "
            "ready. Some samples, or one worker, take much longer than the rest: find them. To bridge the gaps, set "
            f"prefetch_factor={2 * (now.prefetch_factor or 2)} (now {now.prefetch_factor}), or in_order=False, which "
            "changes the order of batches."
        )
    if kind == "cold_cache":
        return (
            f"Early batches read {format_bytes(seen.early_storage_bytes_per_batch or 0.0)} each from storage; later "
            "ones come from the page cache. Later epochs need no change. To speed up the first epoch, copy the data "
            "to a local disk beforehand."
        )
    if kind == "io_bound":
        return (
            f"The workers were waiting for storage in {100 * (seen.storage_wait_share or 0.0):.0f} % of the polls. "
            "Copy the data to a local disk, pack many small files into a few large ones, or keep decoded samples in "
            f"memory. More workers than cores ({run.host.cores:g}) can help if the storage serves them in parallel: "
            f"{_settings_line(now, plan)}. {_search(run)} measures it."
        )
    if kind == "cpu_bound":
        return (
            f"More workers will not help: {cpu_times}. Do less work per sample: cache what is "
            "computed each time (decoded, tokenized or featurized samples), store smaller samples, or get more cores."
        )
    if kind == "main_process":
        return (
            f"More workers will not help. The limit is unpacking what the {now.num_workers} workers send. Return a few "
            "large tensors instead of many small ones or Python objects, and collate in the workers."
        )
    too_full = f"The step could use {plan.workers_needed} workers (now {now.num_workers}), but /dev/shm has no room "
    too_full += "for their batches. Enlarge it: docker run --shm-size=..., or --ipc=host."
    if plan.settings.num_workers <= now.num_workers:
        return too_full
    found = BY_THE_FINDER if run.has_trainer else f"{_search(run)} finds them."
    advice = f"In the DataLoader set {_settings_line(now, plan)}. {found}"
    limits = {"cores": f" Then the cores are the limit: {cpu_times}.", "shm": f" {too_full}"}
    return advice + limits.get(plan.limited_by or "", "")


def _search(run: RunMeasurements) -> str:
    return "NumWorkersFinder()" if run.has_trainer else "find_loader_settings(loader, step_time_s=...)"


def _cpu_times(run: RunMeasurements, load_cpu_s: float, step_cpu_s: float) -> str:
    """Return what a batch and a step take of which cores, in words."""
    host = run.host
    cores = f"{host.cores:g} core{'s' if host.cores > 1 else ''}"
    if host.cores_in_reach is not None and host.cores_in_reach < 0.9 * host.cores:
        cores += f", of which other jobs leave it {host.cores_in_reach:.2g}"
    if host.local_ranks > 1:
        cores += f" for {host.local_ranks} ranks"
    return (
        f"a batch takes {format_duration(load_cpu_s)} of CPU time and a step {format_duration(step_cpu_s)}, and this "
        f"job has {cores}"
    )


def _settings_line(now: LoaderSettings, plan: LoaderPlan) -> str:
    changes, kept = [], []
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory"):
        new, old = getattr(plan.settings, name), getattr(now, name)
        if new != old:
            changes.append(f"{name}={new} (now {old})")
        else:
            kept.append(f"{name}={old}")
    return ", ".join(changes) + (", keep " + ", ".join(kept) if changes and kept else ", ".join(kept))
