"""Samples in memory that are fetched one by one, and batches that are fetched at once as the report advises."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import code_in, diagnosed
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from trainings import Model, quiet_trainer

from lightning_gpu_tools.training import line_sampler

ROWS, BATCH = 40_000, 1000

pytestmark = pytest.mark.filterwarnings("ignore::lightning_gpu_tools.errors.LowGPUUtilizationWarning")


@pytest.fixture(autouse=True)
def many_samples_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_sampler, "MEAN_S", 1 / 200)


class Counting(Model):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[tuple[int, ...]] = Counter()
        self.rows: Counter[float] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes[tuple(batch[0].shape)] += 1
        self.rows.update(batch[1].tolist())
        return super().training_step(batch[0], batch_idx)


class Called(TensorDataset):
    """Tensors that count how often they are asked for."""

    calls = 0

    def __getitem__(self, index: Any) -> Any:
        self.calls += 1
        return super().__getitem__(index)


def a_table() -> TensorDataset:
    return TensorDataset(torch.rand(ROWS, 4), torch.arange(ROWS))


@pytest.mark.follows(
    "Fetch each batch by one index: DataLoader(dataset, batch_size=None, ", "fetch a batch by one index: "
)
def test_a_table_is_read_batch_by_batch_as_advised(tmp_path: Path) -> None:
    loader = DataLoader(a_table(), batch_size=BATCH, shuffle=True, drop_last=True)
    found = diagnosed(tmp_path, Counting(), loader, max_epochs=2)
    assert found.evidence["kind"] == "cpu_bound"
    assert "advised_num_workers" not in found.evidence
    assert not any(words in found.advice for words in ("num_workers=", "decoding", "NumWorkersFinder"))
    dataset = Called(*a_table().tensors)
    code = code_in(found.advice, r"DataLoader\(dataset, .*\)\)(?=\.)")
    classes = (DataLoader, BatchSampler, RandomSampler)
    model = Counting()
    followed = eval(code, {"dataset": dataset, **{one.__name__: one for one in classes}})
    quiet_trainer(tmp_path, max_epochs=1).fit(model, followed)
    assert model.sizes == {(BATCH, 4): ROWS // BATCH}
    assert model.rows == Counter(range(ROWS))
    assert dataset.calls == ROWS // BATCH


class Pairs(TensorDataset):
    """Samples that are not rows of a table."""

    def __getitem__(self, index: int) -> Any:
        return self.tensors[0][index], self.tensors[1][index]


class AtOnce(Pairs):
    def __getitems__(self, indices: list[int]) -> Any:
        return [tensor[indices] for tensor in self.tensors]


@pytest.mark.follows("Give the dataset a method `__getitems__(self, indices)`")
def test_other_cheap_samples_are_fetched_at_once_as_advised(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, Counting(), DataLoader(Pairs(*a_table().tensors), batch_size=BATCH), max_epochs=4)
    if found.evidence["load_cpu_ms_per_batch"] < 0.6 * found.evidence["load_ms_per_batch"]:
        pytest.skip("other programs take the cores")
    assert found.evidence["kind"] == "cpu_bound"
    assert hasattr(AtOnce, code_in(found.advice, r"`(\w+)\(self, indices\)`"))
    option = code_in(found.advice, r"the loader a (\w+) that returns it unchanged")
    model = Counting()
    followed = DataLoader(AtOnce(*a_table().tensors), batch_size=BATCH, **{option: lambda batch: batch})
    quiet_trainer(tmp_path, max_epochs=1).fit(model, followed)
    assert model.sizes == {(BATCH, 4): ROWS // BATCH}
    assert model.rows == Counter(range(ROWS))
