"""What workers share with the training process, and what not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from lightning_gpu_tools.loaders.dataset_copies import DatasetCopies
from lightning_gpu_tools.loaders.switch import Switch
from lightning_gpu_tools.readings import LoaderSettings


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


def workers(count: int, *, persistent: bool = False) -> LoaderSettings:
    return LoaderSettings(
        num_workers=count, prefetch_factor=2 if count else None, persistent_workers=persistent, pin_memory=False
    )


@pytest.fixture
def records(tmp_path: Path) -> Records:
    (tmp_path / "records").write_bytes(bytes(range(60)))
    return Records(tmp_path / "records")


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("users", [0, 2])
def test_no_file_is_shared_by_two_processes(records: Records, users: int, wrapped: bool) -> None:
    dataset: Dataset[Any] = ConcatDataset([Subset(records, range(60))]) if wrapped else records
    switch = Switch(DataLoader(dataset, batch_size=None, num_workers=users))
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


def test_what_is_plain_or_was_there_before_stays(records: Records) -> None:
    records.transform = object()
    copies = DatasetCopies(records)
    records.transform, records.seen, records.label = object(), [1], "x"
    made = copies.make()
    assert made is not records
    assert vars(made) == vars(records)


def test_what_cannot_be_copied_is_handed_on_as_it_is() -> None:
    class Stubborn(Dataset[int]):
        def __copy__(self) -> Stubborn:
            raise RuntimeError("no")

    stubborn = Stubborn()
    assert DatasetCopies(stubborn).make() is stubborn
    assert DatasetCopies(range(3)).make() == range(3)
