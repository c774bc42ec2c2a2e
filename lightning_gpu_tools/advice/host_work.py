"""What the GPU waits for on the host: data, callbacks, loggers, checkpoints, validation, starting epochs. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from statistics import median

from lightning_gpu_tools.advice.findings import (
    FIND_FUNCTION,
    MIN_CEILING,
    MIN_UTILIZATION_PERCENT,
    Cause,
    Evidence,
    Finding,
    ceiling,
    counted,
    median_interval,
)
from lightning_gpu_tools.advice.loader_plan import BY_THE_FINDER, LoadCost, LoaderPlan, plan_loader, settings_line
from lightning_gpu_tools.training.phases import DATA_LOADING, OUTSIDE_LOOP, PAUSES, TRAINER, UNEXPLAINED, base_phase
from lightning_gpu_tools.training.run_measurements import (
    COPY,
    TRAINING_STEP,
    VALIDATION,
    LoaderSettings,
    LoadingFacts,
    RunMeasurements,
    settled,
)
from lightning_gpu_tools.units import format_bytes, format_duration, printable

# Our defaults.
_MAX_VALIDATION = 0.25  # of the wall time; on a fifth as many samples, forward alone takes some 7 %
_MAX_UNNAMED = 0.10  # from here on, no run is healthy
# Lightning 2.6 takes 0.2 to 0.5 ms of its own around a step, and more where cores are few. No setting changes it.
_USUAL_TRAINER_S = 0.001
_REST_SHARE = 0.02  # that the advised change leaves to the cause; a smaller gain is not worth reporting

_ADVICE: dict[Cause, str] = {
    "callback": "Run {name} {times} times less often, or make it cheaper.",
    "logging": "Log less often: Trainer(log_every_n_steps={rarely}). Training waits while {name} writes.",
    "checkpoint": "Save {times} times less often (ModelCheckpoint(every_n_train_steps=... or every_n_epochs=...)), or "
    "save in the background with AsyncCheckpointIO(PortableCheckpointIO()).",
    "garbage_collection": "Call gc.collect() and gc.freeze() once before training: later collections then skip what "
    "exists. Where the program calls gc.collect() itself, call it {times} times less often.",
    "epoch_start": "Make epochs longer{keep_workers}.",
    # Without a GPU nothing is copied.
    "host_to_device_copy": "Make the transfer hooks cheaper (transfer_batch_to_device, on_after_batch_transfer), or do "
    "their work in the dataset, where workers run it in parallel.",
}
_ADVICE_IN_OWN_LOOP: dict[Cause, str] = {
    **_ADVICE,
    "logging": "Log {times} times less often. Training waits meanwhile.",
    "checkpoint": "Save {times} times less often, or save in the background.",
    "host_to_device_copy": "Make moving the batch cheaper, or do that work in the dataset, where workers run it in "
    "parallel.",
}
# A Trainer calls these by name.
_ADVICE_ON_METHOD = {
    "log": "Pass fewer metrics to self.log, without prog_bar=True, which syncs in every step.",
    "step": 'Step it less often ("interval": "epoch", or "frequency": {times}, in the scheduler\'s configuration), or '
    "make it cheaper.",
    **dict.fromkeys(
        ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
        "Make {name} cheaper: it runs in every step.",
    ),
}
_KEEP_WORKERS = ", or keep the loader's workers between epochs (persistent_workers=True)"
_LOGGING_STEPS = 50  # Lightning's default of log_every_n_steps
_NAME_IT = "Write `with run.phase('validation'):` around it if it is validation. "


def host_work(run: RunMeasurements) -> list[Finding]:
    """Return a finding for each callback, logger, ... that takes time."""
    found = []
    by_cause = _ADVICE if run.has_trainer else _ADVICE_IN_OWN_LOOP
    on_method = _ADVICE_ON_METHOD if run.has_trainer else {}
    ends_workers = run.loader is not None and run.loader.num_workers > 0 and not run.loader.persistent_workers
    for phase, seconds in run.phase_s.items():
        group, _, name = phase.partition("/")
        if group not in by_cause or (group == COPY and run.on_gpu):  # see inside_step
            continue
        share = min(run.lost_share(phase), run.idle_share)
        times = _times_less(share)
        advice = on_method.get(name.partition(".")[2], by_cause[group]).format(
            name=printable(name or group),
            times=times,
            rarely=_LOGGING_STEPS * math.ceil(times * max(1, run.log_every_n_steps) / _LOGGING_STEPS),
            keep_workers=_KEEP_WORKERS if ends_workers else "",
        )
        found.append(counted(group, share, {**_seconds(run, seconds), "name": name or None}, advice))
    return [*found, *_validation(run)]


def unnamed(run: RunMeasurements) -> list[Finding]:
    """Return a finding for each long line of the time tree that says nothing of what runs there."""
    trainers = _USUAL_TRAINER_S / run.step_s
    usual = {UNEXPLAINED: 0.0, OUTSIDE_LOOP: 0.0, TRAINER: trainers}
    # The rest of the step, where its parts are known. What a GPU loses in it has findings of its own.
    if not run.on_gpu and any(base_phase(phase) == TRAINING_STEP != phase for phase in run.phase_s):
        usual[TRAINING_STEP] = trainers
    shares = {phase: min(run.lost_share(phase), run.idle_share) for phase in usual}
    return [
        counted(
            "unexplained",
            share,
            {"phase": phase, **_seconds(run, run.phase_s[phase])},
            (_NAME_IT if phase == OUTSIDE_LOOP else "") + FIND_FUNCTION,
            avoidable=share - usual[phase],
        )
        for phase, share in shares.items()
        if share - usual[phase] > _MAX_UNNAMED
    ]


def _seconds(run: RunMeasurements, seconds: float) -> Evidence:
    return {"seconds": seconds, "ms_per_step": seconds / run.steps * 1e3}


def _times_less(share: float) -> int:
    """Return how many times less often something must happen to take no more than 2 % of the time."""
    if share >= 1:
        return 1000
    per_work = share / (1 - share)
    return max(2, round(per_work * (1 - _REST_SHARE) / _REST_SHARE + 0.5))


def _validation(run: RunMeasurements) -> list[Finding]:
    seconds = run.phase_s.get(VALIDATION, 0.0)
    taken = min(seconds / run.wall_s, 1.0)
    busy = run.validation_utilization_percent
    if taken < _MAX_VALIDATION or (busy is not None and busy >= MIN_UTILIZATION_PERCENT):
        return []
    times = f"Validate {_times_less(taken)} times less often"
    change = f"{times} and on fewer batches."
    if run.has_trainer:
        change = (
            f"{times} (Trainer(val_check_interval=... or check_val_every_n_epoch=...)) and on fewer batches "
            "(limit_val_batches=...)."
        )
    evidence = {**_seconds(run, seconds), "wall_percent": 100 * taken, "gpu_busy_percent": busy}
    advice = f"{change} Give the validation DataLoader workers, too."
    return [counted("validation", taken * (1 - (busy or 0.0) / 100), evidence, advice)]


# Our defaults, unless a source is named.
# Storage is the limit if the workers wait for it in so many polls and compute for less than so much of the time.
# SageMaker's IOBottleneck rule asks for an I/O wait of 50 %, of a single process.
_STORAGE_WAIT = 0.30
_COMPUTING = 0.50
# Cores are the limit if the workers are runnable for so much of the time, and find no free core in so much of it.
# loadtune calls a CPU saturated at 85 %.
_RUNNABLE = 0.80
_DELAYED = 0.20
_READY = 0.90  # nothing waits for the workers if a batch is ready before so many steps
# One worker lags if, when its batch arrives at last, half of all prefetched batches are ready.
_READY_OUT_OF_ORDER = 0.5
_MIN_LONG_WAITS = 5
# A cold page cache: the first third of a run reads three times as much from storage as the last (gpuprof's rule), and
# waits twice as long.
_COLD_READS = 3.0
_COLD_WAIT = 0.5
_MIN_COLD_BLOCKS = 6
_MIN_STORAGE_BYTES = 64 * 2**10  # per batch
_UNPACKING = 0.5  # of its wait: a training process that computes in it is unpacking batches
# Receiving a batch of one tensor took 0.5 to 2.3 ms, which no setting changes. A step that no longer follows a sleep,
# in which caches go cold, wins as much.
_MIN_UNPACKING_S = 0.005  # twice the most
_RECEIVE_S = 0.001


def data_loading(run: RunMeasurements) -> Finding | None:
    """Return what waiting for data costs and what to change; ``None`` if it costs nothing."""
    blocks = settled(run.blocks)
    wait_s = median(block.data_loading_s / block.steps for block in blocks)
    step_s = median(block.step_s for block in blocks)
    paused_s = sum(run.phase_s.get(phase, 0.0) for phase in PAUSES)
    # A wait that overlaps GPU work costs nothing.
    scale = max(0.0, 1 - paused_s / run.wall_s) * run.exposed(DATA_LOADING)
    share = min(wait_s / step_s * scale, run.idle_share) if step_s > 0 else 0.0
    if share <= 0:
        return None
    shares = [block.data_loading_s / block.steps / block.step_s for block in blocks if block.step_s > 0]
    lower, _ = median_interval(shares) or (min(shares), 1.0)
    evidence: Evidence = {
        "wait_ms_per_step": wait_s * 1e3,
        "step_ms": step_s * 1e3,
        "cores": run.host.cores,
        "exposed_percent": None if run.gpu_idle is None else 100 * run.exposed(DATA_LOADING),
    }
    bound = ceiling(share)
    advice = (
        "The loader is not a torch DataLoader: use its own settings to load in parallel, or to cache what it "
        "computes for each batch."
    )
    if run.loader is not None:
        seen = run.loading or LoadingFacts()
        more, advice, bound = _torch_loader(run, run.loader, seen, wait_s, step_s, share)
        if wait_s < _MIN_UNPACKING_S and ((seen.ready_share or 0.0) >= _READY or more["kind"] == "main_process"):
            return None
        evidence |= more
    bound_lower = min(ceiling(min(lower * scale, share)), bound)
    return replace(counted("data_loading", share, evidence, advice), ceiling=bound, ceiling_lower=bound_lower)


def _torch_loader(
    run: RunMeasurements, loader: LoaderSettings, seen: LoadingFacts, wait_s: float, step_s: float, share: float
) -> tuple[Evidence, str, float]:
    """Return evidence, advice, and the ceiling of following it."""
    # While training waits, the loader delivers all it can: its workers together one batch per step.
    wall_s, cpu_s = loader.num_workers * step_s, run.worker_cpu_s_per_batch
    if not loader.num_workers:
        wall_s = wait_s
        cpu_s = sum(block.data_loading_cpu_s for block in run.blocks) / sum(block.steps for block in run.blocks)
    cost = LoadCost(wall_s=wall_s, cpu_s=cpu_s, batch_bytes=run.batch_bytes)
    computes = cpu_s is None or cpu_s >= _COMPUTING * wall_s
    own_s = max(step_s - wait_s, 1e-6)
    step_cpu_s = min(run.busy_cores, run.host.cores) * own_s
    plan = plan_loader(loader, cost, step_s=own_s, host=run.host, cuda=run.on_gpu, step_cores=run.busy_cores)
    saved_s = step_s - plan.step_s - (_RECEIVE_S if computes and not loader.num_workers else 0.0)
    speedup = ceiling(share * min(1.0, max(0.0, saved_s / wait_s)))
    cpu_times = _cpu_times(run, cpu_s or 0.0, step_cpu_s)
    kind, advice = _shortage(run, loader, seen, plan, computes, speedup, cpu_times)
    more_workers = kind == "too_few_workers"
    evidence: Evidence = {
        "kind": kind,
        "num_workers": loader.num_workers,
        "num_workers_needed": plan.workers_needed,
        "load_ms_per_batch": wall_s * 1e3,
        "step_cpu_ms": step_cpu_s * 1e3,
        "load_cpu_ms_per_batch": None if cpu_s is None else cpu_s * 1e3,
        "advised_num_workers": plan.settings.num_workers if more_workers else None,
    }
    for name, value in asdict(seen).items():
        is_share = value is not None and name.endswith("_share")
        shown = f"workers_{name}" if name in ("runnable_share", "delayed_share") else name
        evidence[shown.replace("_share", "_percent")] = 100 * value if is_share else value
    # Other advice may end the wait altogether.
    bound = speedup if more_workers and plan.limited_by != "shm" else ceiling(share)
    return evidence, advice, bound


def _shortage(
    run: RunMeasurements,
    now: LoaderSettings,
    seen: LoadingFacts,
    plan: LoaderPlan,
    computes: bool,
    speedup: float,
    cpu_times: str,
) -> tuple[str, str]:
    waiting_s = sum(block.data_loading_s for block in run.blocks)
    computing_s = sum(block.data_loading_cpu_s for block in run.blocks)
    is_unpacking = now.num_workers > 0 and computing_s > _UNPACKING * waiting_s
    has_no_free_core = (seen.runnable_share or 0.0) >= _RUNNABLE and (seen.delayed_share or 0.0) >= _DELAYED
    out_of_order = (seen.ready_out_of_order_share or 0.0) if seen.long_waits >= _MIN_LONG_WAITS else 0.0
    early_bytes, late_bytes = seen.early_storage_bytes_per_batch or 0.0, seen.late_storage_bytes_per_batch or 0.0
    search = "NumWorkersFinder()" if run.has_trainer else "find_loader_settings(loader, step_time_s=...)"
    settings = settings_line(now, plan.settings)
    if now.num_workers > 1 and out_of_order >= _READY_OUT_OF_ORDER:
        kind = "slow_worker"
        advice = (
            f"More workers will not help: when a late batch arrives, {100 * out_of_order:.0f} % of those that other "
            "workers prefetched are ready. Find the samples, or the worker, that take so long. To bridge the gaps, set "
            f"prefetch_factor={2 * (now.prefetch_factor or 2)} (now {now.prefetch_factor}), or in_order=False, which "
            "changes the order of batches."
        )
    elif early_bytes >= max(_MIN_STORAGE_BYTES, _COLD_READS * late_bytes) and _waits_less(run):
        kind = "cold_cache"
        advice = (
            f"Early batches read {format_bytes(early_bytes)} each from storage, later "
            "ones from the page cache. Later epochs need no change. For the first one, copy the data to a local disk."
        )
    elif not computes and (seen.storage_wait_share or 0.0) > _STORAGE_WAIT:
        kind = "io_bound"
        advice = (
            f"The workers were waiting for storage in {100 * (seen.storage_wait_share or 0.0):.0f} % of the polls. "
            "Copy the data to a local disk, pack small files into large ones, or keep decoded samples in memory. More "
            f"workers than cores ({run.host.cores:g}) help if the storage serves them in parallel: {settings}. "
            f"{search} measures it."
        )
    elif not is_unpacking and (has_no_free_core or (plan.limited_by == "cores" and speedup < MIN_CEILING)):
        kind = "cpu_bound"
        advice = (
            f"More workers will not help: {cpu_times}. Do less work per sample: cache what is computed each time "
            "(decoding, tokenizing), store smaller samples, or get more cores."
        )
    elif not is_unpacking and (plan.settings.num_workers > now.num_workers or plan.limited_by == "shm"):
        kind = "too_few_workers"
        advice = (
            f"The step could use {plan.workers_needed} workers (now {now.num_workers}), but /dev/shm has no room "
            "for their batches. Enlarge it: docker run --shm-size=..., or --ipc=host."
        )
        if plan.settings.num_workers > now.num_workers:
            found = BY_THE_FINDER if run.has_trainer else f"{search} finds them."
            limits = {"cores": f" Then the cores are the limit: {cpu_times}.", "shm": f" {advice}"}
            advice = f"In the DataLoader set {settings}. {found}{limits.get(plan.limited_by or '', '')}"
    else:
        kind = "main_process"
        advice = (
            f"More workers will not help: the limit is unpacking what the {now.num_workers} workers send. Return few "
            "large tensors, not many small ones or Python objects, and collate in the workers."
        )
    return kind, advice


def _waits_less(run: RunMeasurements) -> bool:
    waits, third = [block.data_loading_s / block.steps for block in run.blocks], len(run.blocks) // 3
    return len(waits) >= _MIN_COLD_BLOCKS and median(waits[-third:]) <= _COLD_WAIT * median(waits[:third])


def _cpu_times(run: RunMeasurements, load_cpu_s: float, step_cpu_s: float) -> str:
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
