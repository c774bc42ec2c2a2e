"""Whether workers may be added, on data alone, and that all advice on loaders agrees with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.examples import WAITS, cpu_run
from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.advice.workers_allowed import why_not_searched, why_not_switched, workers_allowed
from lightning_gpu_tools.training.run_measurements import LoaderFacts, LoadingFacts, RunMeasurements

PLAIN = LoaderFacts(kind="torch.utils.data.dataloader.DataLoader", dataset="Photos")
OPEN = replace(PLAIN, open_files=("Photos.file",))
STREAM = replace(PLAIN, is_iterable=True, splits=False)
ON_STORAGE = LoadingFacts(samples=50, storage_wait_share=0.6)


def loading(run: RunMeasurements) -> Finding:
    return next(one for one in diagnose(run).findings if one.cause == "data_loading")


def waiting(began: LoaderFacts, now: LoaderFacts | None = None, **options: Any) -> RunMeasurements:
    return cpu_run(WAITS, loader_began=began, loader_now=now or began, **options)


def test_all_obstacles_are_said_at_once() -> None:
    said = workers_allowed(replace(STREAM, open_files=("Photos.file",), is_daemonic=True)).reasons
    assert said.startswith("This process is daemonic and may not start workers. Start it with")
    assert "`Photos.file` is open, and forked workers would share it. Open it in the worker" in said
    assert "`Photos` is iterable and does not split by worker" in said


@pytest.mark.parametrize(("shards", "ranks", "most"), [(None, 1, None), (1, 1, 1), (8, 1, 8), (8, 4, 2), (2, 4, 1)])
def test_the_shards_of_a_rank_limit_its_workers(shards: int | None, ranks: int, most: int | None) -> None:
    assert workers_allowed(replace(STREAM, splits=True, shards=shards, ranks=ranks)).most == most


@pytest.mark.parametrize(
    ("began", "change"),
    [
        (OPEN, {}),
        (STREAM, {}),
        (replace(PLAIN, is_daemonic=True), {}),
        (replace(PLAIN, keeps_position=True), {}),
        (replace(PLAIN, own_iterator=True), {}),
        (replace(PLAIN, not_copyable="Photos.lock"), {}),
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
