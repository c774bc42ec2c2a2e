"""Advice on loaders, followed: on the slow one of several, on one inside of something else, on samples in memory."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import code_in, diagnosed, settings_in
from loader_switching import shorten_trials
from own_loops import Network
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from trainings import Model, Samples, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, find_loader_settings, load_report, watch
from lightning_gpu_tools.training import line_sampler
from lightning_gpu_tools.types import Finding, TrainingWatch

LOAD_S, STEP_S, BATCHES = 0.03, 0.004, 50

pytestmark = pytest.mark.filterwarnings("ignore::lightning_gpu_tools.errors.LowGPUUtilizationWarning")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample many lines, and try few settings."""
    monkeypatch.setattr(line_sampler, "MEAN_S", 1 / 200)
    shorten_trials(monkeypatch.setattr)


class Photos(Samples):
    """The slow dataset."""

    def __init__(self) -> None:
        super().__init__(BATCHES, time.sleep, LOAD_S)


class OfSeveral(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["real"], batch_idx)


@pytest.mark.follows("DataLoader(..., {}) (now {})", " for the loader")
def test_the_slow_loader_of_a_trainer_is_named_and_gets_workers(tmp_path: Path) -> None:
    loaders = {"noise": DataLoader(Samples(BATCHES)), "real": DataLoader(Photos())}
    found = diagnosed(tmp_path, OfSeveral(time.sleep, STEP_S), loaders)
    before = load_report(tmp_path).diagnosis.waiting_share
    key, dataset = re.search(r'for the loader "(\w+)" \((\w+)\)', found.advice).groups()  # type: ignore[union-attr]
    assert found.evidence["loader"] == f'"{key}"'
    assert type(loaders[key].dataset).__name__ == dataset == "Photos"
    loaders[key] = DataLoader(Photos(), **settings_in(found.advice))
    quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()]).fit(OfSeveral(time.sleep, STEP_S), loaders)
    after = load_report(tmp_path).diagnosis.waiting_share
    assert before is not None
    assert after is not None
    assert after < before  # on a busy machine, workers wait for cores, too


# Loops


def measured(folder: Path, batches: Callable[[TrainingWatch], Iterable[Any]]) -> Finding:
    network = Network(time.sleep, STEP_S / 0.1)
    with watch(folder=str(folder), min_steps=10, min_seconds=0) as run:
        for batch in batches(run):
            while not isinstance(batch, torch.Tensor):
                batch = batch[-1]
            network.step(batch)
    assert run.diagnosis is not None
    return next(one for one in run.diagnosis.findings if one.cause == "data_loading")


def photos(**options: Any) -> DataLoader[Any]:
    return DataLoader(Photos(), **options)


@pytest.mark.follows(" finds them.")
def test_a_wrapped_loader_gets_the_settings_of_the_loader_itself(tmp_path: Path) -> None:
    found = measured(tmp_path, lambda run: run.batches(tqdm(photos(), disable=True)))
    assert found.evidence["kind"] == "too_few_workers"
    assert found.evidence["num_workers"] == 0
    workers = settings_in(found.advice)["num_workers"]
    after = measured_again(tmp_path, lambda run: run.batches(photos(num_workers=workers)))
    assert after is None or after.share < found.share
    assert load_report(tmp_path).settings["dataset"] == "Photos"
    call = code_in(found.advice, r"(\w+\(loader, step_time_s=)\.\.\.\) finds them")
    result = eval(f"{call}{STEP_S}, budget_s=20)", {"loader": photos(), "find_loader_settings": find_loader_settings})
    assert result.settings.num_workers > 1


def measured_again(folder: Path, batches: Callable[[TrainingWatch], Iterable[Any]]) -> Finding | None:
    try:
        return measured(folder, batches)
    except StopIteration:  # training no longer waits
        return None


@pytest.mark.follows("watch() sees no DataLoader inside of this ", "enumerate(run.batches(loader)), not")
def test_a_hidden_loader_gets_settings_once_passed_directly(tmp_path: Path) -> None:
    found = measured(tmp_path, lambda run: run.batches(enumerate(photos())))
    assert "watch() sees no DataLoader inside of this enumerate." in found.advice
    code = code_in(found.advice, r"enumerate\(run\.batches\(loader\)\)")
    after = measured(tmp_path, lambda run: eval(code, {"run": run, "loader": photos()}))
    assert settings_in(after.advice)["num_workers"] > 1


# Samples in memory that are fetched one by one

ROWS, BATCH = 40_000, 1000
TABLE = torch.rand(ROWS, 4), torch.arange(ROWS)


class Counting(Model):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[tuple[int, ...]] = Counter()
        self.rows: Counter[float] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes[tuple(batch[0].shape)] += 1
        self.rows.update(batch[1].tolist())
        return super().training_step(batch[0], batch_idx)


class AtOnce(TensorDataset):
    def __getitems__(self, indices: list[int]) -> Any:
        return self[indices]


@pytest.mark.follows("Give the dataset a method `__getitems__(self, indices)`")
def test_cheap_samples_are_fetched_at_once_as_advised(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, Counting(), DataLoader(TensorDataset(*TABLE), batch_size=BATCH), max_epochs=4)
    if found.evidence["load_cpu_ms_per_batch"] < 0.6 * found.evidence["load_ms_per_batch"]:
        pytest.skip("other programs take the cores")
    assert found.evidence["kind"] == "cpu_bound"
    assert hasattr(AtOnce, code_in(found.advice, r"`(\w+)\(self, indices\)`"))
    option = code_in(found.advice, r"the loader a (\w+) that returns it unchanged")
    model = Counting()
    followed = DataLoader(AtOnce(*TABLE), batch_size=BATCH, **{option: lambda batch: batch})
    quiet_trainer(tmp_path, max_epochs=1).fit(model, followed)
    assert model.sizes == {(BATCH, 4): ROWS // BATCH}
    assert model.rows == Counter(range(ROWS))
