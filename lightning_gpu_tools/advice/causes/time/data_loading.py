"""data_loading: training waits for batches.

Takes the median wait in steady steps. On a GPU, only waits during which the GPU was idle count, by CUDA events around
sampled steps. The kind comes from polls of the workers (/proc: running, without a core, waiting for storage), from
batches that are ready early or late, and from CPU times.
"""

from dataclasses import replace
from statistics import median
from typing import Any

from lightning_gpu_tools.advice.causes.time.cpu_contention import in_cores, one_thread_per_worker
from lightning_gpu_tools.advice.findings import (
    LOADER_SETTINGS,
    MIN_CEILING,
    MIN_CEILING_LOWER,
    MIN_SAMPLES,
    Cause,
    Evidence,
    Finding,
    Findings,
    Variant,
    is_of_program,
    known,
    median_interval,
    seen_in,
    sentence_of,
    top_lines,
)
from lightning_gpu_tools.advice.loader_plan import (
    BETWEEN_RUNS,
    BY_THE_FINDER,
    LoadCost,
    LoaderPlan,
    as_searched,
    plan_loader,
    predict_step,
    settings_line,
    with_range,
)
from lightning_gpu_tools.advice.lost_time import exposed_share, idle_share, lost_time
from lightning_gpu_tools.advice.workers import most_workers, obstacles, why_not_searched, why_not_switched
from lightning_gpu_tools.training.phases import IN_WORKER, PAUSES
from lightning_gpu_tools.training.run_measurements import (
    DATA_LOADING,
    LoaderFacts,
    LoaderSettings,
    RunMeasurements,
    StepBlock,
)
from lightning_gpu_tools.units import format_bytes, format_duration, plural, printable

# Our defaults, unless a source is named.
# Storage is the limit if the workers wait for it in more than the first share of polls, and compute for less than the
# second share of the time. SageMaker's IOBottleneck rule requires an I/O wait of 50%, of a single process.
_STORAGE_WAIT = 0.30
_COMPUTING = 0.50
# Cores are the limit if the workers are runnable for the first share of the time, and find no free core in the second
# share of it. loadtune calls a CPU saturated at 85%.
_RUNNABLE = 0.80
_DELAYED = 0.20
_READY = 0.90  # the workers are fast enough if a batch is ready before this share of steps
# One worker lags if half of all prefetched batches are ready when its batch arrives.
_READY_OUT_OF_ORDER = 0.5
_MIN_LONG_WAITS = 5
# A cold page cache: the first third of a run reads three times as much from storage as the last third (gpuprof's rule),
# and waits twice as long.
_COLD_READS = 3.0
_COLD_WAIT = 0.5
_MIN_COLD_BLOCKS = 6
_MIN_STORAGE_BYTES = 64 * 2**10  # per batch
_UNPACKING = 0.5  # of its wait: a training process that computes for this part is unpacking batches
# Receiving a batch of one tensor took 0.5 to 2.3 ms, which no setting changes.
_MIN_UNPACKING_S = 0.005  # twice the longest
# Indexing a few tensors and putting the rows together takes 5 to 20 us per sample (measured), decoding an image 100 us
# or more.
_MAX_SAMPLE_S = 50e-6
_MIN_BATCH = 32  # samples
_MAX_OWN = 0.20  # of the sampled lines: those of functions that the dataset calls
_FINDER = "NumWorkersFinder()"
_UNPACK_LESS = (
    "The limit is unpacking what the workers send; more workers will not help. Return a few large tensors, not many "
    "small ones or Python objects, and collate in the workers."
)


def find(run: RunMeasurements) -> Findings:
    wait_s, step_s, share, lower = _steady_wait(run)
    if share <= 0:
        return
    found = lost_time(
        run,
        share,
        "Waiting for data takes",
        _of_another_loader(run),
        phase=DATA_LOADING,
        evidence={
            "wait_ms_per_step": wait_s * 1e3,
            "loader": run.loader_now.name or None,
        },
        detail=f"{format_duration(wait_s)} of {format_duration(step_s)} per steady step",
        lower=lower,
    )
    if run.loader is not None:
        found = _of_torch_loader(found, run, run.loader, wait_s, step_s)
    if run.searched is not None:
        found = as_searched(found, run.searched)
    phase = IN_WORKER if found.evidence.get("num_workers") else DATA_LOADING
    lines, sentence = top_lines(run.lines, phase, whose="the loader's time")
    if lines is not None and (phase == DATA_LOADING or found.evidence["kind"] != "main_process"):
        evidence = {**found.evidence, "source_lines": lines}
        found = replace(found, evidence=evidence, advice=f"{found.advice} {sentence}".strip())
    yield found


def _steady_wait(run: RunMeasurements) -> tuple[float, float, float, float]:
    """Return the wait per step for the slowest loader, the step time, the share lost to it, and its lower bound."""
    blocks = [block for block in run.blocks if block.step_s > 0]
    if not blocks:
        return 0.0, 0.0, 0.0, 0.0
    wait_s = run.loader_wait_share * median(block.data_loading_s / block.steps for block in blocks)
    step_s = median(block.step_s for block in blocks)
    paused_s = sum(run.phase_s.get(phase, 0.0) for phase in PAUSES)
    # A wait that overlaps GPU work costs nothing.
    scale = max(0.0, 1 - paused_s / run.wall_s) * exposed_share(run, DATA_LOADING)
    share = min(wait_s / step_s * scale, idle_share(run))
    shares = [block.data_loading_s / block.steps / block.step_s for block in blocks]
    lower, _ = median_interval(shares) or (min(shares), 1.0)
    return wait_s, step_s, share, min(lower * run.loader_wait_share * scale, share)


def why_not(run: RunMeasurements, finding: Finding) -> str:
    wait_s = float(finding.evidence["wait_ms_per_step"]) / 1e3
    is_ready = (run.loading.ready_share or 0.0) >= _READY
    if wait_s < _MIN_UNPACKING_S and (is_ready or finding.evidence.get("kind") == "main_process"):
        return f"it is {format_duration(wait_s)} per step, about the time to receive a ready batch"
    return ""


def _of_another_loader(run: RunMeasurements) -> str:
    facts = run.loader_now
    if facts.is_iterator and not run.has_trainer:
        kind = printable(facts.kind.rpartition(".")[2])
        return (
            f"watch() sees no DataLoader inside of this {kind}. Pass the DataLoader itself: "
            "enumerate(run.batches(loader)), not run.batches(enumerate(loader))."
        )
    kind = f" but a {printable(facts.kind)}" if facts.kind else ""
    return (
        f"The loader{_name(facts)} is not a torch DataLoader{kind}. Use its own settings to load in parallel, or cache "
        "what it computes for each batch."
    )


def _name(facts: LoaderFacts) -> str:
    """Return the name of a loader among several, after a space; empty if it is the only one."""
    dataset = f" ({printable(facts.dataset)})" if facts.dataset else ""
    return f" {printable(facts.name)}{dataset}" if facts.name else ""


def _of_torch_loader(
    found: Finding, run: RunMeasurements, loader: LoaderSettings, wait_s: float, step_s: float
) -> Finding:
    """Return the finding with the kind, the advice, and the predicted speedup."""
    cost, own_s = _cost_of(run, loader, wait_s, step_s), max(step_s - wait_s, 1e-6)
    # The cores that the training process keeps busy while it does not wait for data; 1 if not measured.
    busy_s = sum(block.cpu_s for block in run.blocks)
    working_s = sum(block.wall_s - block.data_loading_s for block in run.blocks)
    step_cores = busy_s / working_s if busy_s > 0 and working_s > 0 else 1.0
    step: dict[str, Any] = {"step_s": own_s, "host": run.host, "cuda": run.on_gpu, "step_cores": step_cores}
    plan = plan_loader(loader, cost, most_workers=most_workers(run.loader_began), **step)
    tried = max(plan.settings.num_workers, loader.num_workers + 1)
    # The saved part of the wall time. A wait that overlaps GPU work counts only if the GPU was idle.
    saved = [found.share * (step_s - one_s) / wait_s for one_s in predict_step(loader, cost, tried, **step)]
    upper, expected, lower = (1 / (1 - share) for share in saved)
    if _has_no_free_core(run):
        lower, expected, upper = (min(1.0, one) for one in (lower, expected, upper))
    if upper >= MIN_CEILING_LOWER:
        lower, upper = lower / (1 + BETWEEN_RUNS), upper * (1 + BETWEEN_RUNS)
    cpu_s = cost.cpu_s or 0.0
    computing = 1.0 if cost.cpu_s is None else min(1.0, cpu_s / cost.wall_s)
    kind, advice = "cpu_bound", _fetched_at_once(run, loader, min(cpu_s, cost.wall_s), computing)
    if not advice:
        ranks = f" for {run.host.local_ranks} ranks" if run.host.local_ranks > 1 else ""
        cpu_limit = f"The CPU is the limit: this job has {in_cores(run.host.cores)}{ranks}."
        if cost.cpu_s is not None:
            step_cpu = format_duration(min(step_cores, run.host.cores) * own_s)
            cpu_limit += f" A batch takes {format_duration(cpu_s)} of CPU time, and a step {step_cpu}."
        is_certain = expected >= MIN_CEILING and lower > MIN_CEILING_LOWER
        kind, advice = _shortage(run, loader, plan, computing, cpu_limit, is_certain=is_certain)
        is_planned = kind == "too_few_workers" and plan.settings.num_workers > loader.num_workers
        # Other advice may end the whole wait.
        is_advised = is_planned and not obstacles(run.loader_began)
        found = with_range(found, tried, lower, expected, upper, is_advised=is_advised)
    evidence: Evidence = {
        "kind": kind,
        "num_workers": loader.num_workers,
        "load_ms_per_batch": cost.wall_s * 1e3,
        "load_cpu_ms_per_batch": None if cost.cpu_s is None else cpu_s * 1e3,
        "workers_runnable_threads": run.loading.runnable_threads,
    }
    return replace(found, advice=advice, evidence={**found.evidence, **known(evidence)})


def _cost_of(run: RunMeasurements, loader: LoaderSettings, wait_s: float, step_s: float) -> LoadCost:
    """Return what loading a batch takes."""
    # While training waits, the loader delivers all it can: its workers together deliver one batch per step.
    wall_s, cpu_s = loader.num_workers * step_s, run.worker_cpu_s_per_batch
    delayed = run.loading.delayed_share or 0.0
    if not loader.num_workers:
        steady = sum(run.blocks, StepBlock())
        wall_s, cpu_s = wait_s, steady.data_loading_cpu_s / steady.steps
        delayed = min(1.0, steady.data_loading_core_wait_s / steady.data_loading_s)
    # Waiting for a core is no waiting for storage.
    wall_s = max((1 - delayed) * wall_s, min(wall_s, cpu_s or 0.0), 1e-6)
    return LoadCost(wall_s=wall_s, cpu_s=cpu_s, batch_bytes=run.batch_bytes)


def _shortage(
    run: RunMeasurements,
    now: LoaderSettings,
    plan: LoaderPlan,
    computing: float,
    cpu_limit: str,
    *,
    is_certain: bool,
) -> tuple[str, str]:
    """Return the kind and the advice.

    ``computing`` is the share of loading that is CPU time, ``cpu_limit`` a sentence about the cores, and
    ``is_certain`` whether the planned workers help.
    """
    seen, reasons, search = run.loading, obstacles(run.loader_began), _search(run)
    planned, name = plan.settings.num_workers, _name(run.loader_now)
    settings = settings_line(now, plan.settings) + (f" for the loader{name}" if name else "")
    out_of_order = (seen.ready_out_of_order_share or 0.0) if seen.long_waits >= _MIN_LONG_WAITS else 0.0
    if now.num_workers > 1 and out_of_order >= _READY_OUT_OF_ORDER:
        return "slow_worker", (
            f"Some batches delay the others: when a late one arrives, {100 * out_of_order:.0f}% of the batches "
            "prefetched by other workers are ready. Find the slow samples, or the slow worker. To bridge the gaps, set "
            f"prefetch_factor={2 * (now.prefetch_factor or 2)} (now {now.prefetch_factor}), or in_order=False, which "
            "changes the order of batches."
        )
    if early_bytes := _read_when_cold(run):
        return "cold_cache", (
            f"Early batches read {format_bytes(early_bytes)} each from storage, later ones from the page cache."
            f"{sentence_of(run.storage)} Later epochs need no change."
        )
    if computing < _COMPUTING and (seen.storage_wait_share or 0.0) > _STORAGE_WAIT:
        advice = (
            f"The workers were waiting for storage in {100 * (seen.storage_wait_share or 0.0):.0f}% of the polls."
            f"{sentence_of(run.storage)} Pack small files into large ones, keep decoded samples in memory, or "
            "copy the data to a faster disk."
        )
        if planned > now.num_workers:
            more = f"{reasons} More workers help if the storage serves them in parallel: {settings}.".strip()
            advice += f" {more}" + (f" {search} measures it." if search else "")
        return "io_bound", advice
    waiting_s = sum(block.data_loading_s for block in run.blocks)
    if now.num_workers and sum(block.data_loading_cpu_s for block in run.blocks) > _UNPACKING * waiting_s:
        return "main_process", _UNPACK_LESS
    if one_thread := one_thread_per_worker(run):
        return "cpu_bound", one_thread
    if _has_no_free_core(run) or (plan.limited_by == "cores" and not is_certain) or now.num_workers == planned == 0:
        return "cpu_bound", (
            f"{cpu_limit} Do less work per sample: cache what is computed each time (decoding, tokenizing), store "
            "smaller samples, or get more cores."
        )
    if planned <= now.num_workers and plan.limited_by not in ("shm", "shards"):
        return "main_process", _UNPACK_LESS
    if reasons:
        return "too_few_workers", f"{reasons} Then set {settings}."
    sentences = []
    if planned > now.num_workers:
        found = BY_THE_FINDER if search == _FINDER else f"{search} finds them."
        sentences = [f"Set {settings}.", found if search else ""]
    needs = f"{run.activity.capitalize()} needs {plural(plan.workers_needed, 'worker')} (now {now.num_workers}), but"
    if plan.limited_by == "shm":
        sentences.append(f"{needs} /dev/shm is too small for their batches: docker run --shm-size=..., or --ipc=host.")
    elif plan.limited_by == "shards":
        shards = plural(run.loader_began.shards or 0, "shard")
        sentences.append(
            f"{needs} the dataset has {shards}, and a worker needs its own. Store the data in more shards."
        )
    return "too_few_workers", " ".join(filter(None, sentences))


def _read_when_cold(run: RunMeasurements) -> float:
    """Return the bytes that each early batch read from storage, if later ones were cached; 0 otherwise."""
    seen = run.loading
    early_bytes, late_bytes = seen.early_storage_bytes_per_batch or 0.0, seen.late_storage_bytes_per_batch or 0.0
    waits, third = [block.data_loading_s / block.steps for block in run.blocks], len(run.blocks) // 3
    waits_less = len(waits) >= _MIN_COLD_BLOCKS and median(waits[-third:]) <= _COLD_WAIT * median(waits[:third])
    return early_bytes if waits_less and early_bytes >= max(_MIN_STORAGE_BYTES, _COLD_READS * late_bytes) else 0.0


def _fetched_at_once(run: RunMeasurements, loader: LoaderSettings, cpu_s: float, computing: float) -> str:
    """Return how to fetch whole batches, which take this CPU time; empty if that is not what takes the time."""
    facts, size = run.loader_now, loader.batch_size or 0
    if facts.is_iterable or size < _MIN_BATCH or cpu_s > _MAX_SAMPLE_S * size:
        return ""
    lines = seen_in(run.lines, IN_WORKER if loader.num_workers else DATA_LOADING)
    whole = sum(line.samples for line in lines)
    own = sum(line.samples for line in lines if is_of_program(line.file) and line.function != "__getitem__")
    is_cheap = computing >= _COMPUTING and whole >= MIN_SAMPLES and own <= _MAX_OWN * whole
    if not facts.is_table and not is_cheap:
        return ""
    return (
        f"Fetching takes {format_duration(cpu_s / size)} for each of the {size} samples of a batch. Give the dataset a "
        "method `__getitems__(self, indices)` that returns a whole batch, fetched in one operation, and the loader a "
        "collate_fn that returns it unchanged. More workers would help less."
    )


def _search(run: RunMeasurements) -> str:
    """Return the search that would act on the loader; empty if it would leave it alone."""
    if run.has_trainer and run.stage == "fit":
        return "" if why_not_switched(run.loader_began, run.loader_now) else _FINDER
    return "" if why_not_searched(run.loader_began) else "find_loader_settings(loader, step_time_s=...)"


def _has_no_free_core(run: RunMeasurements) -> bool:
    return (run.loading.runnable_share or 0.0) >= _RUNNABLE and (run.loading.delayed_share or 0.0) >= _DELAYED


CAUSE = Cause(
    rows=[
        Variant(
            "Waiting for data takes ...; *Next* has `DataLoader(..., num_workers=...)` and a range of the speedup",
            "set these values, or let `NumWorkersFinder()` measure and apply them. If that is not enough, the limit is "
            "the step itself, the CPU cores, or /dev/shm",
            "too_few_workers",
        ),
        Variant(
            "... is open, and forked workers would share it; ... is iterable and does not split by worker; this "
            "process may not start workers",
            "first what the advice says: open the file in the worker, split the stream by `get_worker_info()`, start "
            "the process with `multiprocessing.Process(daemon=False)`; then `num_workers`",
            "too_few_workers",
        ),
        Variant("Fetching takes ... for each of the ... samples of a batch", "`__getitems__`", "cpu_bound"),
        Variant("The CPU is the limit: this job has ... cores", "less work per sample, or more cores", "cpu_bound"),
        Variant(
            "Each worker keeps ... threads runnable, on ... cores",
            "`cv2.setNumThreads(0)`, `torch.set_num_threads(1)` and the like in `worker_init_fn`",
            "cpu_bound",
        ),
        Variant(
            "The workers were waiting for storage in ...% of the polls", "few large files; a faster disk", "io_bound"
        ),
        Variant(
            "When a late batch arrives, ...% of the prefetched batches are ready",
            "find the slow samples; `prefetch_factor`, or `in_order=False`",
            "slow_worker",
        ),
        Variant("Early batches read ... each from storage, later ones from the page cache", "no change", "cold_cache"),
        Variant(
            "The limit is unpacking what the workers send", "few large tensors, not many small ones", "main_process"
        ),
    ],
    find=find,
    why_not=why_not,
    settings=LOADER_SETTINGS,
    verified_on="cpu",
)
