"""The number of workers that a loader needs and may have, and limits of the host."""

import math
from dataclasses import replace
from typing import Any

import pytest
from synthetic import GIB, NO_WORKERS, WAITS, a_host, cpu_run, gpu_run

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.advice.loader_plan import LoadCost, LoaderPlan, plan_loader
from lightning_gpu_tools.advice.workers import most_workers, obstacles, why_not_searched, why_not_switched
from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training.run_measurements import (
    LoaderFacts,
    LoaderResult,
    LoaderSettings,
    LoaderTrial,
    LoadingFacts,
    RunMeasurements,
)


def plan(load_s: float, step_s: float, host: HostBudget, **cost: Any) -> LoaderPlan:
    return plan_loader(NO_WORKERS, LoadCost(wall_s=load_s, **cost), step_s=step_s, host=host, cuda=True)


def test_enough_workers_are_planned_with_some_headroom() -> None:
    planned = plan(0.040, 0.010, a_host())
    assert planned.settings.num_workers == 5  # 4 would do exactly, and fall behind at the first slow batch
    assert planned.limited_by is None
    assert planned.settings.persistent_workers
    assert planned.settings.pin_memory
    assert planned.settings.prefetch_factor == 2


def test_cores_limit_computing_workers_but_not_waiting_ones() -> None:
    computing = plan(0.080, 0.010, a_host(4), cpu_s=0.080)
    # 80 ms of loading and 10 ms of training on 4 cores take 22.5 ms a batch at best, and 4 workers come near enough.
    assert (computing.settings.num_workers, computing.limited_by, computing.workers_needed) == (4, "cores", 9)
    without_headroom = plan(0.080, 0.001, a_host(2), cpu_s=0.080)  # for which there is no core
    assert without_headroom.settings.num_workers == 2
    waiting = plan(0.080, 0.010, a_host(4), cpu_s=0.004)
    assert (waiting.settings.num_workers, waiting.limited_by) == (9, None)


@pytest.mark.parametrize("host", [a_host(cores_in_reach=4.0), a_host(16, local_ranks=4)])
def test_cores_of_other_jobs_and_ranks_do_not_count(host: HostBudget) -> None:
    assert plan(0.080, 0.010, host, cpu_s=0.080) == plan(0.080, 0.010, a_host(4), cpu_s=0.080)


def test_a_step_on_the_cpu_leaves_fewer_cores_to_load_with() -> None:
    cost = LoadCost(wall_s=0.080, cpu_s=0.080)
    threads = plan_loader(NO_WORKERS, cost, step_s=0.040, host=a_host(4), cuda=False, step_cores=4)
    # 80 ms of loading and 4 times 40 ms of training on 4 cores; a step more for threads in lockstep.
    assert threads.limited_by == "cores"
    assert plan_loader(NO_WORKERS, cost, step_s=0.040, host=a_host(4), cuda=False).limited_by is None


def test_batches_must_fit_into_shared_memory() -> None:
    docker_default = a_host(shm_free_bytes=64 * 2**20)
    planned = plan(0.080, 0.010, docker_default, batch_bytes=10 * 2**20)
    assert (planned.settings.num_workers, planned.limited_by) == (2, "shm")
    assert plan(0.080, 0.010, docker_default, batch_bytes=GIB).settings.num_workers == 0


def loading(run: RunMeasurements) -> Finding:
    return next(one for one in diagnose(run).findings if one.cause == "data_loading")


FOUND = replace(NO_WORKERS, num_workers=4, prefetch_factor=2)


def searched(chosen: LoaderSettings, *tried: tuple[LoaderSettings, float]) -> LoaderResult:
    trials = tuple(LoaderTrial(settings=settings, batch_s=batch_s) for settings, batch_s in tried)
    return LoaderResult(original=NO_WORKERS, settings=chosen, reason="As measured.", trials=trials)


@pytest.mark.parametrize(
    ("result", "kind", "said", "bound"),
    [
        (None, "too_few_workers", "NumWorkersFinder() finds and applies them.", None),
        (searched(FOUND, (NO_WORKERS, 0.05), (FOUND, 0.02)), "too_few_workers", "num_workers=4, prefetch", 2.5 * 1.15),
        (searched(NO_WORKERS, (NO_WORKERS, 0.05), (FOUND, 0.06)), "io_bound", "do less work per sample", 5.0),
        (searched(NO_WORKERS), "too_few_workers", "As measured.", None),
        # The search ended after a trial of these settings.
        (searched(NO_WORKERS, (NO_WORKERS, 0.05)), "too_few_workers", "As measured.", None),
    ],
)
def test_measurements_of_a_search_replace_the_prediction(
    result: LoaderResult | None, kind: str, said: str, bound: float | None
) -> None:
    run = gpu_run({"data_loading": 400.0, "training_step": 100.0}, 20.0, loader=NO_WORKERS, searched=result)
    finding = loading(run)
    assert finding.evidence["kind"] == kind
    assert said in finding.advice
    assert ("NumWorkersFinder()" in finding.advice) == (result is None)
    assert bound is None or finding.ceiling == pytest.approx(bound)


# Whether workers may be added, and that all advice on loaders agrees with it


PLAIN = LoaderFacts(kind="torch.utils.data.dataloader.DataLoader", dataset="Photos")
OPEN = replace(PLAIN, open_files=("Photos.file",))
STREAM = replace(PLAIN, is_iterable=True, splits=False)
ON_STORAGE = LoadingFacts(storage_wait_share=0.6)


def waiting(began: LoaderFacts, now: LoaderFacts | None = None, **options: Any) -> RunMeasurements:
    return cpu_run(WAITS, loader_began=began, loader_now=now or began, **options)


def test_all_obstacles_are_said_at_once() -> None:
    said = obstacles(replace(STREAM, open_files=("Photos.file",), is_daemonic=True))
    assert said.startswith("This process is daemonic and may not start workers. Start it with")
    assert "`Photos.file` is open, and forked workers would share it. Open it in the worker" in said
    assert "`Photos` is iterable, and does not split its samples by worker" in said


@pytest.mark.parametrize(("shards", "ranks", "most"), [(None, 1, math.inf), (1, 1, 1), (8, 1, 8), (8, 4, 2), (2, 4, 1)])
def test_the_shards_of_a_rank_limit_its_workers(shards: int | None, ranks: int, most: float) -> None:
    assert most_workers(replace(STREAM, splits=True, shards=shards, ranks=ranks)) == most


@pytest.mark.parametrize(
    ("began", "change"),
    [
        (OPEN, {}),
        (STREAM, {}),
        (replace(PLAIN, is_daemonic=True), {}),
        (replace(PLAIN, keeps_position=True), {}),
        (replace(PLAIN, own_iterator=True), {}),
        (replace(PLAIN, within="WebLoader"), {}),
        (PLAIN, {"open_files": ("Photos.file",)}),
        (PLAIN, {"contents": 1}),
        (PLAIN, {}),
    ],
)
def test_advice_names_the_finder_where_it_acts_and_nowhere_else(began: LoaderFacts, change: dict[str, Any]) -> None:
    now = replace(began, **change)
    acts = why_not_switched(began, now) is None
    assert acts == (began is PLAIN and not change)
    for run in (waiting(began, now), waiting(began, now, loading=ON_STORAGE), waiting(began, now, load_cpu_ms=29)):
        assert acts or "NumWorkersFinder" not in loading(run).advice
    assert ("NumWorkersFinder()" in loading(waiting(began, now)).advice) == acts
    searches = "find_loader_settings" in loading(waiting(began, now, has_trainer=False)).advice
    assert searches == (why_not_searched(began) is None)
