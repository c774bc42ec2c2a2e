"""A loader that is changed in mid-epoch delivers what it would have: in real trainings, against untouched ones."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from loader_switching import CHANGES, ITEMS, LOADERS, Drawing, Items, SwitchAt, arguments, assert_equal, settings, train
from torch.utils.data import DataLoader

from lightning_gpu_tools.types import LoaderSettings

POINTS = itertools.cycle([(0, 4), (1, 4), (0, 1), (0, 0)])
# Every kind of loader with one change, and one kind with every change.
CASES = [
    (kind, *change, *next(POINTS)) for change in CHANGES for kind in (LOADERS if change == CHANGES[0] else ["shuffled"])
]


@functools.cache
def untouched(kind: str, before: LoaderSettings) -> Drawing:
    return train(LOADERS[kind](**arguments(before)), folder=Path("."))


@pytest.mark.parametrize(("kind", "before", "after", "epoch", "done"), CASES)
def test_batches_and_random_numbers_are_those_of_an_untouched_fit(
    tmp_path: Path, kind: str, before: LoaderSettings, after: LoaderSettings, epoch: int, done: int
) -> None:
    ours = train(LOADERS[kind](**arguments(before)), SwitchAt(epoch, done, after), folder=tmp_path)
    if kind == "drawing" and not before.num_workers:  # its draws are the workers' now, so later shuffles differ
        assert ours.batches[:9] == untouched(kind, before).batches[:9]
        assert [sorted(itertools.chain(*ours.batches[i : i + 9])) for i in (0, 9, 18)] == [list(range(26))] * 3
        assert ours.numbers != untouched(kind, before).numbers
    else:
        assert_equal(ours, untouched(kind, before))


class Peek(Callback):
    """A callback that logs a batch of the training data in mid-epoch."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 5:
            next(iter(trainer.train_dataloader))


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 6, "reload_dataloaders_every_n_epochs": 1},
        {"peek": True},
        {"validation": DataLoader(ITEMS, 4), "val_check_interval": 3},
        {"accumulate_grad_batches": 2, "max_steps": 7},
    ],
    ids=", ".join,  # the names alone: two processes that share the tests must name them alike
)
def test_what_a_trainer_does_with_its_loader_makes_no_difference(tmp_path: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    peeks = [Peek()] if options.pop("peek", False) else []
    plain = train(LOADERS["shuffled"](), *peeks, folder=tmp_path, **options)
    ours = train(LOADERS["shuffled"](), *peeks, SwitchAt(0, 4, settings(2, True)), folder=tmp_path, **options)
    assert_equal(ours, plain)


def test_living_workers_learn_what_changes_between_epochs(tmp_path: Path) -> None:
    class Epochs(Items):
        epoch = -1.0

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((4,), self.epoch)

    class SetEpoch(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            dataset.epoch = float(trainer.current_epoch)

    dataset = Epochs()
    ours = train(DataLoader(dataset, 13), SetEpoch(), SwitchAt(0, 1, settings(1, persistent=True)), folder=tmp_path)
    assert [batch[0] for batch in ours.batches] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
