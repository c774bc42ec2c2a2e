"""The number of workers for a DataLoader; trials of settings and their result. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from lightning_gpu_tools.advice.findings import LOADER_SETTINGS, Finding, ceiling
from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training.run_measurements import LoaderResult, LoaderSettings, LoaderTrial

# Fluctuating load times empty the queue: with exactly load time / step time workers, 6 to 9% of the wait remained.
_HEADROOM = 1.15
# Our defaults from here on.
TOLERANCE = 0.03  # smaller differences in predicted speed count as equal
_SHM_SHARE = 0.8  # queues and unpickling also need room in /dev/shm
_MEMORY_SHARE = 0.5  # the rest is for memory that training will still take, and for the page cache
# A step whose threads wait for each other loses time whenever a worker takes the core of one. The loss is this part of
# the time that workers take from it, or of its own time, whichever is less. Large matrix products lose the least,
# convolutions the most. Each is (least, expected, most), from runs of benchmarks/ceilings.py on two cores, of an
# Intel and of an AMD processor.
_LOST_OF_EXCESS = (0.45, 0.65, 0.90)
_LOST_OF_STEP = (0.50, 1.00, 2.40)
_LOST_TO_ONE = (0.05, 0.35, 0.75)  # of the excess: a single worker takes only one core
# A step while another process loads, as (least, expected, most): a multiple of its time, and the seconds to receive the
# batch. If both compute, it also loses this part of its own computing.
_WITH_COMPUTING_WORKERS = ((1.00, 1.02, 1.06), (0.0003, 0.0010, 0.0018))
_WITH_WAITING_WORKERS = ((1.00, 1.00, 1.04), (0.0, 0.0002, 0.0010))
_LOST_OF_COMPUTING = (0.0, 0.0, 0.2)
# A core that no longer sleeps between two steps is faster: its caches are warm, and its clock is high. A step that
# computes on it gains up to this part of its time.
_WON = 0.40
BETWEEN_RUNS = 0.03  # the median steps of two runs of the same training differ by this much
Limit = Literal["cores", "shm", "memory", "shards"]
_DEFAULT_PREFETCH_FACTOR = 2  # torch.utils.data.DataLoader's own


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadCost:
    """The cost of loading one batch; ``None`` = not measured."""

    wall_s: float  # of one worker
    cpu_s: float | None = None
    batch_bytes: int | None = None
    worker_bytes: int | None = None  # memory that one more worker takes


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderPlan:
    """Settings for a DataLoader, and what limits them."""

    settings: LoaderSettings
    limited_by: Limit | None  # the resource that keeps training from running as fast as its step
    workers_needed: int  # to feed the step without a wait
    most_workers: float = math.inf  # that fit into memory and /dev/shm; infinite if not measured


# The shortest, the expected and the longest time of a step, from its start to the start of the next one, in seconds.
Range = tuple[float, ...]


def plan_loader(
    current: LoaderSettings,
    cost: LoadCost,
    *,
    step_s: float,
    host: HostBudget,
    cuda: bool,
    step_cores: float = 1.0,
    most_workers: float = math.inf,
) -> LoaderPlan:
    """Return the smallest number of workers that comes within 3% of the best speed this host can reach.

    ``step_s`` excludes any wait for data. ``step_cores`` is the number of cores that the training process keeps busy.
    ``most_workers`` is the number of shards, if that limits them.
    """
    cores = _cores(host)

    def workers_s(workers: int) -> float:
        return _with_workers(current, cost, step_s, min(step_cores, cores), cores, workers)[1]

    best_s = min(workers_s(workers) for workers in (1, max(1, math.ceil(cores))))
    workers_needed = _workers_for(step_s, cost)
    workers = _workers_for(best_s, cost)
    while workers < cores and workers_s(workers) > (1 + TOLERANCE) * best_s:
        workers += 1
    if cost.cpu_s and workers * cost.cpu_s > cores * cost.wall_s:  # workers without a core do not help
        workers = max(1, math.ceil(cores * cost.wall_s / cost.cpu_s))
    limited_by: Limit | None = "cores" if best_s > (1 + TOLERANCE) * step_s else None
    prefetch_factor = current.prefetch_factor or _DEFAULT_PREFETCH_FACTOR
    in_shm = most_workers_in_shm(cost, host, prefetch_factor)
    limits: dict[Limit, float] = {"shm": in_shm, "memory": math.inf, "shards": most_workers}
    if cost.worker_bytes:
        limits["memory"] = _MEMORY_SHARE * host.memory_available_bytes / host.local_ranks // cost.worker_bytes
    for resource, limit in limits.items():
        if limit < workers:
            workers, limited_by = int(limit), resource
    if workers and cost.wall_s + step_s <= (1 + TOLERANCE) * max(workers_s(workers), cost.wall_s / workers):
        workers = 0
    settings = LoaderSettings(
        num_workers=workers,
        prefetch_factor=prefetch_factor if workers else None,
        persistent_workers=workers > 0,
        pin_memory=cuda,
        batch_size=current.batch_size,
    )
    return LoaderPlan(
        settings=settings,
        limited_by=limited_by,
        workers_needed=workers_needed,
        most_workers=min(limits.values()),
    )


def predict_step(
    current: LoaderSettings,
    cost: LoadCost,
    workers: int,
    *,
    step_s: float,
    host: HostBudget,
    cuda: bool,
    step_cores: float,
) -> Range:
    """Return the predicted time of a step with this many workers; arguments as in :func:`plan_loader`."""
    cores = _cores(host)
    with_workers = _with_workers(current, cost, step_s, min(step_cores, cores), cores, workers)
    computes = 2 * (cost.cpu_s or 0.0) >= cost.wall_s
    own_cores = 0.0 if cuda else min(1.0, step_cores)  # a GPU's step is not faster for a warm core
    slower, receive_s = _WITH_COMPUTING_WORKERS if computes else _WITH_WAITING_WORKERS
    lost = tuple(part * own_cores for part in _LOST_OF_COMPUTING) if computes else (0.0, 0.0, 0.0)
    won = 0.0 if computes else _WON * own_cores
    if current.num_workers:  # the step was measured while workers ran, and already includes all of this
        receive_s = lost = (0.0, 0.0, 0.0)
        won = 0.0
    # If other programs use cores, workers may have to wait for one, like the training process.
    crowded = max(1.0, host.cores / host.cores_in_reach) if host.cores_in_reach else 1.0
    slower = (*slower[:2], slower[2] * crowded)
    ranges = zip(with_workers, slower, lost, receive_s, (won, 0.0, 0.0), strict=True)
    return tuple(
        max((by + more - less) * one_s + more_s, cost.wall_s / workers) for one_s, by, more, more_s, less in ranges
    )


def _cores(host: HostBudget) -> float:
    return (host.cores if host.cores_in_reach is None else min(host.cores, host.cores_in_reach)) / host.local_ranks


def _with_workers(
    current: LoaderSettings, cost: LoadCost, step_s: float, step_cores: float, cores: float, workers: int
) -> Range:
    """Return the time of a step while workers load on the same cores.

    CPU time of workers beyond the free cores delays the step. One worker delays it by all of that time, because the
    step's threads wait for each other; several delay it in parallel. Threads in lockstep lose more.
    """
    excess_s = 0.0 if cost.cpu_s is None else max(0.0, cost.cpu_s + (step_cores - cores) * step_s)
    if current.num_workers:  # the step was measured while workers ran, and already includes their delay
        return (step_s + excess_s / cores,) * 3
    lockstep = min(1.0, max(0.0, (step_cores - 1) / (cores - 1))) if cores > 1 else 0.0
    of_excess = _LOST_TO_ONE if workers == 1 else _LOST_OF_EXCESS
    lost_s = (
        lockstep * min(one * excess_s, other * step_s) for one, other in zip(of_excess, _LOST_OF_STEP, strict=True)
    )
    return tuple(step_s + excess_s / min(workers, cores) + lost for lost in lost_s)


def _workers_for(step_s: float, cost: LoadCost) -> int:
    return math.ceil(_HEADROOM * cost.wall_s / ((1 + TOLERANCE) * step_s))


def most_workers_in_shm(cost: LoadCost, host: HostBudget, prefetch_factor: int) -> float:
    """Return the number of workers whose batches fit into ``/dev/shm``; infinite if unknown."""
    if not cost.batch_bytes or host.shm_free_bytes is None:
        return math.inf
    room_bytes = _SHM_SHARE * host.shm_free_bytes / host.local_ranks
    return room_bytes // (prefetch_factor * cost.batch_bytes)


# Half of 30 steps on the CPU were slower or faster than their stand-in by more than this.
_TRIAL_ERROR = 0.15
_PREDICTED = ("advised_num_workers", "predicted_num_workers", "speedup", "speedup_lower", "speedup_upper")
# Part of the advice until a search has measured its settings.
BY_THE_FINDER = "NumWorkersFinder() finds and applies them."


def combined(trials: Iterable[LoaderTrial]) -> list[LoaderTrial]:
    """Return the fastest trial of each set of settings that did not fail: other programs can only slow one down."""
    fastest: dict[LoaderSettings, LoaderTrial] = {}
    for trial in trials:
        if trial.batch_s is not None and trial.failed is None:
            before = fastest.setdefault(as_tried(trial.settings), trial)
            fastest[as_tried(trial.settings)] = min(before, trial, key=lambda trial: trial.batch_s or math.inf)
    return [*fastest.values()]


def as_tried(settings: LoaderSettings) -> LoaderSettings:
    """Return settings without ``persistent_workers`` and ``pin_memory``, which trials leave out."""
    return replace(settings, persistent_workers=False, pin_memory=False)


def trial_of(trials: Iterable[LoaderTrial], settings: LoaderSettings | None) -> LoaderTrial | None:
    """Return the fastest trial of these settings; ``None`` if they were not tried or failed."""
    if settings is None:
        return None
    return next((trial for trial in combined(trials) if as_tried(trial.settings) == as_tried(settings)), None)


def settings_line(now: LoaderSettings, wanted: LoaderSettings) -> str:
    """Return the changed settings as code: ``"DataLoader(..., num_workers=4, pin_memory=True) (now 0, False)"``."""
    changed = [name for name in LOADER_SETTINGS if getattr(wanted, name) != getattr(now, name)]
    code = ", ".join(f"{name}={getattr(wanted, name)}" for name in changed)
    return f"DataLoader(..., {code}) (now {', '.join(str(getattr(now, name)) for name in changed)})"


def with_range(
    finding: Finding, workers: int, lower: float, expected: float, upper: float, *, is_advised: bool
) -> Finding:
    """Return a finding with the expected speedup of this many workers, and its range; its bound if they are advised."""
    predicted = {"predicted_num_workers": workers, "speedup": expected, "speedup_lower": lower, "speedup_upper": upper}
    finding = replace(finding, evidence={**finding.evidence, **predicted})
    if not is_advised:
        return finding
    # A step without a wait before it can gain more than the wait, because its caches stay warm.
    bound, evidence = min(upper, ceiling(finding.share)), {**finding.evidence, "advised_num_workers": workers}
    return replace(finding, evidence=evidence, ceiling=bound, ceiling_lower=min(finding.ceiling_lower, bound))


def as_searched(finding: Finding, result: LoaderResult) -> Finding:
    """Return a ``data_loading`` finding with the measurements of a search instead of the predictions."""
    others = any(trial.measured and trial.settings != result.original for trial in result.trials)
    before = trial_of(result.trials, result.original) if others else None
    after = trial_of(result.trials, result.settings)
    if before is None or after is None or not before.batch_s or not after.batch_s or result.original is None:
        return replace(finding, advice=finding.advice.replace(BY_THE_FINDER, result.reason))
    measured = f"Measured by NumWorkersFinder: {result.reason}"
    if result.settings is not None and result.settings != result.original and not result.applied:
        advice = f"Set {settings_line(result.original, result.settings)}. {measured}"
        found = replace(finding, evidence={**finding.evidence, "kind": "too_few_workers"}, advice=advice)
        speedup, error = before.batch_s / after.batch_s, 1 + _TRIAL_ERROR
        workers = after.settings.num_workers
        return with_range(found, workers, speedup / error, speedup, speedup * error, is_advised=True)
    if finding.evidence.get("kind") not in ("too_few_workers", "io_bound"):  # only these advise more workers
        return finding
    evidence = {name: value for name, value in finding.evidence.items() if name not in _PREDICTED}
    cpu_ms, wall_ms = (float(evidence.get(name, 0.0)) for name in ("load_cpu_ms_per_batch", "load_ms_per_batch"))
    evidence["kind"] = "cpu_bound" if cpu_ms >= wall_ms / 2 else "io_bound"
    advice = (
        f"{measured} To load faster, do less work per sample: cache repeated computations, or store decoded or smaller "
        "samples."
    )
    return replace(finding, evidence=evidence, advice=advice, ceiling=ceiling(finding.share))
