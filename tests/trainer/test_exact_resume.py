"""A training that is killed and resumed ends like one that is not."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from loader_switching import Watch, shorten_trials
from resumed_trainings import (
    BATCH,
    SAMPLES,
    Kill,
    Manual,
    Model,
    OwnGenerator,
    Photos,
    Shuffled,
    Stream,
    Unscheduled,
    check,
    everything,
    plain,
    same,
    train,
    validated,
)
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from lightning_gpu_tools import ExactResume, NumWorkersFinder
from lightning_gpu_tools.errors import CheckpointMismatchError
from lightning_gpu_tools.loaders import plan


class Positioned:
    """A loader of one's own that keeps its position, without random numbers."""

    def __init__(self) -> None:
        self.batches = 0

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.batches %= len(self)
        while self.batches < len(self):
            self.batches += 1
            yield torch.full((BATCH, 4), self.batches / 10)

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.batches = state_dict["batches"]


class ByMetric(Model):
    """A learning rate that follows a torchmetric."""

    monitor = "mean"


class Unfreezing(BaseFinetuning):
    """A layer that trains from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layer[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layer[0], optimizer, lr=0.01)


class Changing(Callback):
    """Changes the module after each batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.hooks += torch.rand(3)


def several_loaders() -> dict[str, Any]:
    return {"few": plain(partial(Photos, 8), shuffle=True), "many": plain(shuffle=True, num_workers=1)}


# What is trained, and arguments of `check`.
CASES: dict[str, tuple[Callable[[], Model], dict[str, Any]]] = {
    "persistent": (lambda: Model(partial(plain, shuffle=True, num_workers=2, persistent_workers=True)), {}),
    "sampler and workers": (lambda: Model(lambda: plain(sampler=Shuffled(), num_workers=2)), {}),
    "sampler with a generator": (lambda: Model(lambda: plain(sampler=OwnGenerator(np.random.default_rng(3)))), {}),
    "batch sampler": (
        lambda: Model(lambda: DataLoader(Photos(), batch_sampler=BatchSampler(RandomSampler(Photos()), BATCH, False))),
        {},
    ),
    "several": (lambda: Model(several_loaders), {}),
    "loader with a position": (lambda: Model(Positioned), {}),
    "validation within epochs": (
        validated,
        {"steps": [6, 16], "val_check_interval": 6, "accumulate_grad_batches": 3},
    ),
    "reloaded": (
        validated,
        {"steps": [6, 16], "limit_train_batches": 10, "reload_dataloaders_every_n_epochs": 1},
    ),
    "manual optimization": (lambda: Manual(plain), {}),
    "torchmetric": (lambda: ByMetric(plain), {"steps": [9, 13]}),  # within its epoch, and at its end
    "averaging": (
        lambda: Unscheduled(plain),
        {"callbacks": lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]},
    ),
    "accumulation": (lambda: Unscheduled(plain), {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]}),
    "finetuning": (lambda: Unscheduled(plain), {"callbacks": lambda: [Unfreezing()]}),
    "changes after a batch": (lambda: Unscheduled(plain), {"callbacks": lambda: [Changing()]}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path, name: str) -> None:
    make, options = CASES[name]
    check(tmp_path, make, **{"steps": [random.Random(name).randrange(14, 26)], **options})


class Curriculum(Model):
    """Samples that are harder in each epoch."""

    def on_train_epoch_start(self) -> None:
        self.factor = 1.0 + self.current_epoch

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(self.factor * batch)


class SetInBoth(Curriculum):
    def on_train_start(self) -> None:
        self.on_train_epoch_start()


def test_a_hook_that_is_not_repeated_is_named(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="factor"):  # noqa: SIM117
        with pytest.warns(UserWarning, match=r"on_train_epoch_start does not .* also be set in on_train_start"):
            check(tmp_path, lambda: Curriculum(plain), [20])
    check(tmp_path / "both", lambda: SetInBoth(plain), [20])


class Slow(Photos):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().__getitem__(index)


def test_the_finder_changes_workers_and_no_random_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_trials(monkeypatch.setattr)
    monkeypatch.setattr(plan, "STUDY_STEPS", 8)
    outcomes, watch = [], Watch()
    for more in ([], [watch, NumWorkersFinder()]):
        seed_everything(1)
        model = Model(partial(plain, Slow, shuffle=True))
        outcomes.append(everything(train(tmp_path, model, 7, more=more, max_epochs=3), model))
    assert watch.workers[0] == 0
    assert max(watch.workers) > 0
    assert same(*outcomes)


def test_a_killed_training_leaves_a_file_that_lightning_reads_and_another_number_of_ranks_does_not(
    tmp_path: Path,
) -> None:
    model, threads = validated(), threading.active_count()
    before = {*vars(model)}
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, model, 7, more=[Kill(13)])
    assert not [name for name in {*vars(model)} - before if name.startswith("on_")]
    assert threading.active_count() == threads

    lightnings = Trainer(default_root_dir=tmp_path, max_epochs=2, accelerator="cpu", logger=False)
    lightnings.fit(validated(), ckpt_path=tmp_path / "step=13.ckpt", weights_only=True)
    assert lightnings.global_step == 26

    saved = torch.load(tmp_path / "step=13.ckpt")
    saved["callbacks"]["ExactResume"]["ranks"] *= 2
    torch.save(saved, tmp_path / "of_two.ckpt")
    with pytest.raises(CheckpointMismatchError, match="was saved by 2 ranks, but this run has 1, which"):
        train(tmp_path, validated(), 7, ckpt=tmp_path / "of_two.ckpt")


# What cannot be exact


def test_a_checkpoint_without_positions_is_resumed_with_a_warning(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=5)
    options: Any = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    Trainer(callbacks=[saving], max_steps=5, **options).fit(validated())
    repeats = "The epoch begins again, and 5 of its batches are seen twice"
    with pytest.warns(UserWarning, match=rf"step=5.ckpt was saved without it, so the .* {repeats}"):
        train(tmp_path, validated(), 7, ckpt=saving.best_model_path)


class Cached(Photos):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(1)


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class Averaged(Model):
    def on_train_batch_end(self, *args: Any) -> None:
        pass


INEXACT: dict[str, tuple[Callable[[], Any], ...]] = {
    "Stream is iterated in a way of its own, and its loader has no": (lambda: Model(partial(plain, Stream)),),
    "come in any order": (lambda: Model(partial(plain, num_workers=1, in_order=False)),),
    r"Cached\.rng is a separate random generator": (lambda: Model(partial(plain, Cached)),),
    "Photos is iterated in a way of its own": (lambda: Model(lambda: Own(Photos())),),
    r"Averaged\.on_train_batch_end runs after ModelCheckpoint": (lambda: Averaged(plain),),
    "LearningRateFinder searches again": (
        lambda: Unscheduled(plain),
        lambda: LearningRateFinder(num_training_steps=12),
    ),
}


@pytest.mark.parametrize("sentence", INEXACT)
def test_what_cannot_be_exact_is_said_before_the_first_step(tmp_path: Path, sentence: str) -> None:
    model, *callbacks = (make() for make in INEXACT[sentence])
    with pytest.warns(UserWarning, match=sentence), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, model, 7, more=[*callbacks, Kill(0)])


@pytest.mark.follows("Remove that option.")
def test_a_loader_in_the_order_of_its_sampler_is_exact(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, Model(partial(plain, num_workers=1)), 7, more=[Kill(0)])
    assert not [warning for warning in recwarn if "ExactResume" in str(warning.message)]


def test_a_validation_alone_is_left_as_it_is(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    trainer = Trainer(callbacks=[ExactResume()], accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.validate(validated())
    assert [str(warning.message) for warning in recwarn if "ExactResume" in str(warning.message)] == []
