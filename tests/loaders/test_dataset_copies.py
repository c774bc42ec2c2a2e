"""What workers share with the training process, what not, and what they learn of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from lightning_gpu_tools.loaders.switch import Switch
from lightning_gpu_tools.training.run_measurements import LoaderSettings


class Records(Dataset[tuple[int, bool, int]]):
    """Opens its file at the first sample, as datasets do that are meant for workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None
        self.epoch = 0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[int, bool, int]:
        if self.file is None:
            self.file = self.path.open("rb")
            self.opened_by = os.getpid()
        self.file.seek(index)
        return self.file.read(1)[0], self.opened_by == os.getpid(), self.epoch


class Holder(Dataset[Any]):
    """Keeps the dataset that it wraps where torch's own wrappers do not, and deeper."""

    def __init__(self, base: Records) -> None:
        self.parts = {"base": [base]}

    def __getitem__(self, index: int) -> tuple[int, bool, int]:
        return self.parts["base"][0][index]

    def __len__(self) -> int:
        return 60


WRAPPERS: dict[str, Callable[[Records], Dataset[Any]]] = {
    "itself": lambda records: records,
    "in torch's wrappers": lambda records: ConcatDataset([Subset(records, range(60))]),
    "in one's own": Holder,
}


def workers(count: int, *, persistent: bool = False) -> LoaderSettings:
    return LoaderSettings(
        num_workers=count, prefetch_factor=2 if count else None, persistent_workers=persistent, pin_memory=False
    )


@pytest.fixture
def records(tmp_path: Path) -> Records:
    (tmp_path / "records").write_bytes(bytes(range(60)))
    return Records(tmp_path / "records")


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("users", [0, 2])
def test_no_file_is_shared_by_two_processes(records: Records, users: int, kind: str) -> None:
    switch = Switch(DataLoader(WRAPPERS[kind](records), batch_size=None, num_workers=users))
    seen = []
    for i, (value, own, _) in enumerate(switch.loader):
        seen.append(value)
        assert own
        if i in (5, 20, 40):
            switch.use({5: workers(1), 20: workers(0), 40: workers(3)}[i])
    assert seen == list(range(60))
    assert (records.file is None) == (users > 0)
    switch.close()


def test_workers_that_live_on_learn_what_is_set_in_the_dataset_between_epochs(records: Records) -> None:
    switch = Switch(DataLoader(records, batch_size=None))
    switch.use(workers(1, persistent=True))
    pids = []
    for epoch in (0, 0, 1):
        records.epoch = epoch
        batches = iter(switch.loader)
        assert {next(batches)[2] for _ in range(60)} == {epoch}
        assert switch.inner is not None
        pids.append(switch.inner.pids)
        del batches
    assert pids[0] == pids[1] != pids[2]
    switch.close()


@pytest.mark.parametrize("users", [0, 1])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_was_open_before_is_not_shared_either(records: Records, kind: str, users: int) -> None:
    dataset = WRAPPERS[kind](records)
    assert records[7][0] == 7
    switch = Switch(DataLoader(dataset, batch_size=None, num_workers=users))
    seen = []
    for i, (value, _, _) in enumerate(switch.loader):
        seen.append(value)
        if i == 10:
            switch.use(workers(3))
    assert seen == list(range(60))
    assert switch.settings == switch.users
    switch.look_for_obstacles()
    assert "the dataset holds an open file (dataset" in str(switch.obstacle)
    assert ".file), and worker processes would share it; open it where a sample is loaded" in str(switch.obstacle)
    switch.close()


def test_a_class_that_leaves_its_file_out_of_copies_gets_workers(records: Records) -> None:
    class Leaving(Records):
        def __getstate__(self) -> dict[str, Any]:
            return {**vars(self), "file": None}

    dataset = Leaving(records.path)
    assert dataset[7][0] == 7
    switch = Switch(DataLoader(dataset, batch_size=None))
    switch.use(workers(2))
    assert [value for value, _, _ in switch.loader] == list(range(60))
    assert switch.settings == workers(2)
    switch.close()


def test_the_training_process_loads_in_the_place_of_workers_only_what_it_can_copy(records: Records) -> None:
    assert Switch(DataLoader(Holder(records), num_workers=2)).alone_allowed
    assert records[7][0] == 7
    assert not Switch(DataLoader(Holder(records), num_workers=2)).alone_allowed
    assert Switch(DataLoader(Holder(records))).alone_allowed


class Shift:
    """Adds; also a collate_fn."""

    def __init__(self, by: float = 0.0) -> None:
        self.by = by

    def __call__(self, value: Any) -> Any:
        return value + self.by


class Shifted(Dataset[float]):
    def __init__(self) -> None:
        self.transform = Shift()
        self.offsets = [0.0]
        self.array: Any = None
        self.numbers, self.weights = np.zeros(3), torch.zeros(3)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        sums = self.offsets[0] + float(self.numbers.sum()) + float(self.weights.sum())
        return float(self.transform(0.0) + sums + (0.0 if self.array is None else float(self.array.sum())))


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute that was None": lambda loader: setattr(loader.dataset, "array", np.ones(1)),
    "an attribute's attribute": lambda loader: setattr(loader.dataset.transform, "by", 1.0),
    "an item": lambda loader: loader.dataset.offsets.__setitem__(0, 1.0),
    "an array, in place": lambda loader: loader.dataset.numbers.__setitem__(0, 1.0),
    "a tensor, in place": lambda loader: loader.dataset.weights.__setitem__(0, 1.0),
    "the collate_fn's attribute": lambda loader: setattr(loader.collate_fn, "by", 1.0),
    "the collate_fn": lambda loader: setattr(loader, "collate_fn", Shift(1.0)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_whatever_is_set_between_epochs_is_learnt_by_workers_that_would_live_on(kind: str) -> None:
    switch = Switch(DataLoader(Shifted(), batch_size=None, collate_fn=Shift()))
    assert list(switch.loader) == [0.0] * 4
    switch.use(workers(1, persistent=True))
    assert list(switch.loader) == [0.0] * 4
    CHANGES[kind](switch.loader)
    assert list(switch.loader) == [1.0] * 4
    switch.close()


def test_workers_do_not_live_on_where_nobody_can_tell_whether_something_has_changed() -> None:
    dataset = Shifted()
    dataset.array = np.random.default_rng()
    switch = Switch(DataLoader(dataset, batch_size=None, collate_fn=str, sampler=[]))
    switch.use(workers(1, persistent=True))
    pids = []
    for _ in range(2):
        batches = iter(switch.loader)
        assert list(batches) == []
        assert switch.inner is not None
        pids.append(switch.inner.pids)
    assert pids[0] != pids[1]
    switch.close()
