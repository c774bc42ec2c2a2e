"""What the GPU waits for on the host: data, callbacks, loggers, checkpoints, validation, starting epochs. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, replace
from statistics import median

from lightning_gpu_tools.advice.cpu_contention import waits_for_cores_of_others_s
from lightning_gpu_tools.advice.findings import (
    FIND_FUNCTION,
    MIN_CEILING,
    MIN_CEILING_LOWER,
    MIN_COST_S_PER_STEP,
    MIN_UTILIZATION_PERCENT,
    Cause,
    Evidence,
    Finding,
    as_times,
    ceiling,
    counted,
    median_interval,
)
from lightning_gpu_tools.advice.loader_plan import (
    BETWEEN_RUNS,
    BY_THE_FINDER,
    LoadCost,
    LoaderPlan,
    advised,
    plan_loader,
    predict_step,
    settings_line,
    with_range,
)
from lightning_gpu_tools.training.phases import (
    CALLBACK,
    DATA_LOADING,
    OUTSIDE_LOOP,
    PAUSES,
    PHASES,
    RANK_WAIT,
    TRAINER,
    UNEXPLAINED,
    base_phase,
)
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
_USUAL_VALIDATION = 0.10  # that the advised change leaves to it
_MAX_EPOCHS_APART = 10  # that validation is advised to be: who sees overfitting later than that has lost the time
# Lightning 2.6 takes 0.2 to 0.5 ms of its own around a step, and more where cores are few. No setting changes it.
_USUAL_TRAINER_S = 0.001
_REST_SHARE = 0.02  # that the advised change leaves to the cause; a smaller gain is not worth reporting

_ADVICE: dict[Cause, str] = {
    "callback": "Make {name} cheaper, or have it do its work only in every {times}th step.",
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
    "callback": "Run {name} {times} times less often, or make it cheaper.",
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
        ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"),
        "Make {name} cheaper: it runs in every step.",
    ),
}
# Other methods, which Lightning calls when it is their turn.
_ADVICE_IN_STEP = (
    "Make {name} cheaper: Lightning calls it in every step. Or let it return at once in all but every {times}th step."
)
_ADVICE_IN_EPOCH = "Make {name} cheaper: Lightning calls it in every epoch. Do less in it, or make epochs longer."
_KEEP_WORKERS = ", or keep the loader's workers between epochs (persistent_workers=True)"
_LOGGING_STEPS = 50  # Lightning's default of log_every_n_steps
_MAX_LOGGING_STEPS = 1000  # our default: rarer metrics show too little
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
        times, now = _times_less(share), max(1, run.log_every_n_steps)
        method = name.partition(".")[2]
        usual = by_cause[group]
        if run.has_trainer and group == CALLBACK and method:
            usual = _ADVICE_IN_EPOCH if "epoch" in method else _ADVICE_IN_STEP
        advice = on_method.get(method, usual).format(
            name=printable(name or group),
            times=times,
            rarely=min(_LOGGING_STEPS * math.ceil(times * now / _LOGGING_STEPS), max(_MAX_LOGGING_STEPS, 2 * now)),
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


def _times_less(share: float, rest: float = _REST_SHARE) -> int:
    """Return how many times less often something must happen to take no more than ``rest``: 2, 5, 10, ... to 1000."""
    times = math.inf if share >= 1 else share / (1 - share) * (1 - rest) / rest
    return next((steps for steps in (2, 5, 10, 20, 50, 100, 200, 500) if steps >= times), 1000)


def _validation(run: RunMeasurements) -> list[Finding]:
    seconds = run.phase_s.get(VALIDATION, 0.0)
    taken = min(seconds / run.wall_s, 1.0)
    busy = run.validation_utilization_percent
    if taken < _MAX_VALIDATION or (busy is not None and busy >= MIN_UTILIZATION_PERCENT) or run.validations == 1:
        return []
    evidence = {**_seconds(run, seconds), "wall_percent": 100 * taken, "gpu_busy_percent": busy}
    fewer = "limit_val_batches=..." if run.has_trainer else "fewer batches"
    advice = f"{_rarer_validation(run, taken)}Validate on less ({fewer}), and give the validation DataLoader workers."
    return [counted("validation", taken * (1 - (busy or 0.0) / 100), evidence, advice)]


def _rarer_validation(run: RunMeasurements, taken: float) -> str:
    """Return the option that makes validation usual, with a value, in front of a space; empty if there is none."""
    times = _times_less(taken, _USUAL_VALIDATION)
    if not run.has_trainer or not run.validations or not run.epoch_steps:
        return "" if run.has_trainer else f"Validate {min(times, _MAX_EPOCHS_APART)} times less often. "
    steps = round(run.steps / run.validations)
    if steps < run.epoch_steps:  # within epochs
        rarely = min(times * steps, run.epoch_steps)
        return f"Validate less often: Trainer(val_check_interval={rarely if rarely < run.epoch_steps else '1.0'}). "
    epochs = min(times, _MAX_EPOCHS_APART)
    return f"Validate less often: Trainer(check_val_every_n_epoch={epochs}). " if run.epochs >= 2 * epochs else ""


def harmless(run: RunMeasurements) -> str:
    """Return why the longest line of a healthy run's time tree is no cause; empty if there is no long one."""
    if run.on_gpu:
        return ""  # whose utilization says enough
    groups: defaultdict[str, float] = defaultdict(float)
    for phase, seconds in run.phase_s.items():
        groups[base_phase(phase)] += seconds / run.wall_s
    groups.pop(TRAINING_STEP, None)
    group, share = max(groups.items(), key=lambda item: item[1], default=("", 0.0))
    if share < _MAX_UNNAMED:
        return ""
    each_s = share * run.step_s
    if group == DATA_LOADING:
        waits_s = median(block.data_loading_s / block.steps for block in run.blocks)
        if waits_s < each_s / 2:
            reason = f"a steady step waits only {format_duration(waits_s)}"
        else:
            reason = f"it is {format_duration(waits_s)} per step, about what handing over a ready batch takes"
    elif group == VALIDATION:
        reason = f"less than {100 * _MAX_VALIDATION:.0f} % is usual"
    elif group in (TRAINER, TRAINING_STEP):
        reason = f"it is {format_duration(each_s)} per step, which no setting changes"
    elif group == RANK_WAIT and any(waits_for_cores_of_others_s(run.ranks)):
        reason = "other ranks had no free core then"
    elif each_s < MIN_COST_S_PER_STEP:
        reason = f"it is {format_duration(each_s)} per step, too little to gain from"
    else:
        reason = "it came too rarely to be more than an accident"
    label = PHASES[group].label if group in PHASES else printable(group)
    return f"{label[0].upper()}{label[1:]} takes {100 * share:.0f} % of the wall time, but {reason}."


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
# Receiving a batch of one tensor took 0.5 to 2.3 ms, which no setting changes.
_MIN_UNPACKING_S = 0.005  # twice the most


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
    advice = (
        "The loader is not a torch DataLoader: use its own settings to load in parallel, or to cache what it "
        "computes for each batch."
    )
    found = replace(counted("data_loading", share, evidence, advice), ceiling_lower=ceiling(min(lower * scale, share)))
    if run.loader is None:
        return found
    seen = run.loading or LoadingFacts()
    found = _of_torch_loader(found, run, run.loader, seen, wait_s, step_s)
    unpacking = (seen.ready_share or 0.0) >= _READY or found.evidence["kind"] == "main_process"
    return None if wait_s < _MIN_UNPACKING_S and unpacking else found


def _of_torch_loader(
    found: Finding, run: RunMeasurements, loader: LoaderSettings, seen: LoadingFacts, wait_s: float, step_s: float
) -> Finding:
    # While training waits, the loader delivers all it can: its workers together one batch per step.
    wall_s, cpu_s = loader.num_workers * step_s, run.worker_cpu_s_per_batch
    if not loader.num_workers:
        wall_s = wait_s
        cpu_s = sum(block.data_loading_cpu_s for block in run.blocks) / sum(block.steps for block in run.blocks)
    cost = LoadCost(wall_s=wall_s, cpu_s=cpu_s, batch_bytes=run.batch_bytes)
    own_s = max(step_s - wait_s, 1e-6)
    step_cpu_s = min(run.busy_cores, run.host.cores) * own_s
    plan = plan_loader(loader, cost, step_s=own_s, host=run.host, cuda=run.on_gpu, step_cores=run.busy_cores)
    tried = max(plan.settings.num_workers, loader.num_workers + 1)
    after = predict_step(
        loader, cost, tried, step_s=own_s, host=run.host, cuda=run.on_gpu, step_cores=run.busy_cores
    )
    # The part of the wall time that is saved; of a wait that overlaps GPU work, only what the GPU feels.
    saved = [found.share * (step_s - one_s) / wait_s for one_s in after]
    upper, expected, lower = (1 / (1 - one) for one in saved)
    if _has_no_free_core(seen):
        lower, expected, upper = (min(1.0, one) for one in (lower, expected, upper))
    if upper >= MIN_CEILING_LOWER:  # else there is nothing to predict
        lower, upper = lower / (1 + BETWEEN_RUNS), upper * (1 + BETWEEN_RUNS)
    speedup = (lower, expected, upper)
    computes = cpu_s is None or cpu_s >= _COMPUTING * wall_s
    cpu_times = _cpu_times(run, cpu_s or 0.0, step_cpu_s)
    kind, advice = _shortage(run, loader, seen, plan, computes, tried, speedup, cpu_times)
    evidence: Evidence = {
        "kind": kind,
        "num_workers": loader.num_workers,
        "num_workers_needed": plan.workers_needed,
        "load_ms_per_batch": wall_s * 1e3,
        "step_cpu_ms": step_cpu_s * 1e3,
        "load_cpu_ms_per_batch": None if cpu_s is None else cpu_s * 1e3,
    }
    for name, value in asdict(seen).items():
        is_share = value is not None and name.endswith("_share")
        shown = f"workers_{name}" if name in ("runnable_share", "delayed_share") else name
        evidence[shown.replace("_share", "_percent")] = 100 * value if is_share else value
    known = {name: value for name, value in evidence.items() if value is not None}
    found = with_range(replace(found, advice=advice, evidence={**found.evidence, **known}), tried, *speedup)
    # Other advice may end the wait altogether.
    return advised(found) if kind == "too_few_workers" and plan.settings.num_workers > loader.num_workers else found


def _shortage(
    run: RunMeasurements,
    now: LoaderSettings,
    seen: LoadingFacts,
    plan: LoaderPlan,
    computes: bool,
    tried: int,
    speedup: tuple[float, float, float],
    cpu_times: str,
) -> tuple[str, str]:
    """Return the kind and the advice; ``speedup`` is predicted for as many workers as ``tried``."""
    waiting_s = sum(block.data_loading_s for block in run.blocks)
    computing_s = sum(block.data_loading_cpu_s for block in run.blocks)
    is_unpacking = now.num_workers > 0 and computing_s > _UNPACKING * waiting_s
    out_of_order = (seen.ready_out_of_order_share or 0.0) if seen.long_waits >= _MIN_LONG_WAITS else 0.0
    early_bytes, late_bytes = seen.early_storage_bytes_per_batch or 0.0, seen.late_storage_bytes_per_batch or 0.0
    search = "NumWorkersFinder()" if run.has_trainer else "find_loader_settings(loader, step_time_s=...)"
    lower, expected, upper = speedup
    is_certain = expected >= MIN_CEILING and lower > MIN_CEILING_LOWER
    settings = settings_line(now, plan.settings)
    if plan.settings.num_workers > run.host.cores:
        settings += ". torch warns of more workers than cores: that is fine where they wait for storage"
    if now.num_workers > 1 and out_of_order >= _READY_OUT_OF_ORDER:
        kind = "slow_worker"
        advice = (
            f"Some batches hold the others up: when a late one arrives, {100 * out_of_order:.0f} % of those that other "
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
            f"workers help if the storage serves them in parallel: {settings}. {search} measures it."
        )
    elif not is_unpacking and (_has_no_free_core(seen) or (plan.limited_by == "cores" and not is_certain)):
        kind = "cpu_bound"
        no_help = f"More workers will not help: {cpu_times}"
        may_help = (
            f"The cores are the limit: {cpu_times}. Speedup with num_workers={tried}: {as_times(lower)} to "
            f"{as_times(upper)}; {search} measures it"
        )
        advice = (
            f"{no_help if upper < MIN_CEILING_LOWER else may_help}. Do less work per sample: cache what is computed "
            "each time (decoding, tokenizing), store smaller samples, or get more cores."
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
            advice = f"Set {settings}. {found}{limits.get(plan.limited_by or '', '')}"
    else:
        kind = "main_process"
        advice = (
            f"The limit is unpacking what the {now.num_workers} workers send, which more of them do not speed up. "
            "Return few large tensors, not many small ones or Python objects, and collate in the workers."
        )
    return kind, advice


def _has_no_free_core(seen: LoadingFacts) -> bool:
    return (seen.runnable_share or 0.0) >= _RUNNABLE and (seen.delayed_share or 0.0) >= _DELAYED


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
