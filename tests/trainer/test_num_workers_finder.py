"""The finder in real trainings on the CPU: what it finds, and that it changes nothing else."""

from __future__ import annotations

import io
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from loader_switching import DrawsAlways, frozen_states
from torch.utils.data import DataLoader, Dataset
from trainings import Model, Samples, Stream, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, NumWorkersFinder, load_report

# A batch takes four times as long as a step, and both are waiting, which no load of the machine makes shorter, so that
# workers are faster than none whatever else the machine does.
LOAD_S, STEP_S = 0.016, 0.004


class Slow(Samples):
    def __init__(self, count: int = 40, seconds: float = LOAD_S) -> None:
        super().__init__(count, time.sleep, seconds)


def finder(**options: Any) -> NumWorkersFinder:
    return NumWorkersFinder(**{"budget_s": 2.0, **options})


class Watch(Callback):
    """Notes what a training does from step to step."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.states: list[Any] = []
        self.workers: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.batches.append(batch.flatten().tolist())
        self.states.append(frozen_states())
        self.workers.append(getattr(trainer.train_dataloader, "num_workers", -1))


class Noisy(Model):
    """A model whose steps draw random numbers, as dropout does."""

    def __init__(self, step_s: float = STEP_S) -> None:
        super().__init__(time.sleep, step_s)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        torch.rand(1)
        return super().training_step(batch, batch_idx)


def train(
    folder: Path, callbacks: list[Callback], loader: Any, step_s: float = STEP_S, **options: Any
) -> tuple[Watch, list[torch.Tensor]]:
    seed_everything(7)
    watch, module = Watch(), Noisy(step_s)
    quiet_trainer(folder, callbacks=[*callbacks, watch], **{"max_epochs": 3, **options}).fit(module, loader)
    return watch, [parameter.detach().clone() for parameter in module.parameters()]


def shuffled(dataset: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Slow(), **{"batch_size": 1, "shuffle": True, **options})


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_short_training_gets_workers_and_stays_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    count = 40 + 20 * len(options)
    tuned = train(tmp_path, [found := finder(budget_s=4.0)], shuffled(Slow(count), **options))
    as_usual = train(tmp_path, [], shuffled(Samples(count), **options), step_s=0.0)
    result = found.result
    assert result is not None
    assert result.applied
    assert result.settings is not None
    assert result.settings.num_workers >= 2
    assert "batches/s against" in result.reason
    assert result.seconds < 4.5
    assert tuned[0].workers[-1] == result.settings.num_workers
    assert tuned[0].batches == as_usual[0].batches
    assert tuned[0].states == as_usual[0].states
    assert all(map(torch.equal, tuned[1], as_usual[1]))


def test_settings_as_good_as_promised_are_confirmed_and_reported(tmp_path: Path) -> None:
    train(tmp_path, [found := finder(), GPUUtilizationMonitor()], shuffled(Slow(100)))
    assert found.result is not None
    assert found.result.confirmed
    assert found.result.wait_share is not None
    report = load_report(tmp_path)
    assert report.loader is not None
    assert report.loader.confirmed
    assert report.unseen == ()  # the loader had no workers to be polled until the search was over


def test_without_apply_the_settings_are_only_measured(tmp_path: Path) -> None:
    watch, _ = train(tmp_path, [found := finder(apply=False)], shuffled())
    assert found.result is not None
    assert found.result.settings is not None
    assert found.result.settings.num_workers >= 2
    assert not found.result.applied
    assert set(watch.workers) == {0}


class Drawing(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(4)


def test_random_augmentation_moves_to_the_workers_and_that_is_said(tmp_path: Path) -> None:
    watch, _ = train(tmp_path, [found := finder()], shuffled(Drawing()))
    assert found.result is not None
    assert found.result.applied
    assert "they come from the workers now" in found.result.reason
    assert watch.workers[-1] >= 2
    assert sorted(int(batch[0]) for batch in watch.batches[:40]) == list(range(40))


def test_a_loader_that_feeds_the_step_is_left_as_it_is(tmp_path: Path) -> None:
    watch, _ = train(tmp_path, [found := finder()], shuffled(Samples(30)), 0.05, max_epochs=1)
    assert found.result is not None
    assert found.result.settings == found.result.original
    assert "no settings can make it 5 % faster" in found.result.reason
    assert set(watch.workers) == {0}


def test_what_was_found_holds_for_loaders_that_are_made_again(tmp_path: Path) -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return shuffled(Slow(20))

    seed_everything(7)
    watch = Watch()
    callbacks = [found := finder(), watch]
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, max_epochs=4, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Noisy(), datamodule=Data())
    assert found.result is not None
    assert found.result.settings is not None
    assert found.result.applied
    assert watch.workers[-40:] == [found.result.settings.num_workers] * 40
    assert not found.result.settings.persistent_workers


def test_of_several_loaders_the_first_that_can_be_changed_is(tmp_path: Path) -> None:
    loaders = {"stream": DataLoader(Stream(Samples(60))), "slow": shuffled(Slow(60)), "fast": DataLoader(Samples(60))}

    class Both(Noisy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch["slow"], batch_idx)

    class Each(Watch):
        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.workers = [trainer.train_dataloader[name].num_workers for name in loaders]

    watch = Each()
    quiet_trainer(tmp_path, callbacks=[found := finder(), watch]).fit(Both(), loaders)
    assert found.result is not None
    assert found.result.settings is not None
    assert found.result.applied
    assert watch.workers == [0, found.result.settings.num_workers, 0]


class OwnKind:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(1, 4)] * 30)


class Stateful(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}


class OwnIterator(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return super()._get_iterator()


class Endless(DataLoader[Any]):
    """Keeps one iterator for ever, as some loaders do."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept = DataLoader.__iter__(self)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        while True:
            yield from self.kept
            self.kept = DataLoader(self.dataset).__iter__()


class Holding(Slow):
    """A dataset that holds something."""

    def __init__(self, thing: object) -> None:
        super().__init__()
        self.thing = thing


class Caching(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        vars(self)[str(index)] = index
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (lambda: DataLoader(Stream(Samples(30))), "its dataset is iterable"),
        (lambda: OwnKind(), "OwnKind, not a torch DataLoader"),
        (lambda: shuffled(num_workers=1, in_order=False), "in_order=False"),
        (lambda: Stateful(Samples(30)), "keeps its position"),
        (lambda: OwnIterator(Samples(30)), "OwnIterator has its own _get_iterator"),
        (lambda: Endless(Samples(30)), "a Endless is iterated in a way of its own"),
        (lambda: shuffled(Holding(io.FileIO(__file__))), "it holds an open file"),
        (lambda: shuffled(Holding(threading.Lock())), "cannot pickle '_thread.lock' object"),
        (lambda: shuffled(Holding(i for i in range(3))), "cannot pickle 'generator' object"),
        (lambda: shuffled(Caching()), "its dataset changes while it is used"),
        (lambda: DataLoader(Slow(), sampler=DrawsAlways()), "its sampler draws random numbers during the epoch"),
    ],
)
def test_what_cannot_be_changed_is_left_alone_with_the_reason(
    tmp_path: Path, loader: Callable[[], Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        watch, _ = train(tmp_path, [found := finder()], loader(), limit_train_batches=30, max_epochs=2)
    assert found.result is not None
    assert why in found.result.reason
    assert caplog.text.count(why) == 1
    assert not found.result.applied
    assert len(set(watch.workers)) == 1


def test_a_loader_of_the_users_is_as_before_after_the_fit(tmp_path: Path) -> None:
    loader, other = shuffled(), shuffled()
    before = dict(vars(loader))
    combined = CombinedLoader([other], "max_size_cycle")

    class First(Noisy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[0], batch_idx)

    for model, loaders in ((Noisy(), loader), (First(), combined)):
        trainer = quiet_trainer(tmp_path, callbacks=[found := finder()], max_epochs=1)
        trainer.fit(model, loaders)
        assert found.result is not None
        assert found.result.applied
        assert "process_dataloader" not in vars(trainer.strategy)
    assert vars(loader) == before
    (left,) = combined.flattened
    assert type(left) is DataLoader
    assert left.num_workers == 0
    assert len(list(left)) == 40


def test_a_second_fit_starts_anew_and_the_callback_pickles(tmp_path: Path) -> None:
    found = pickle.loads(pickle.dumps(finder()))
    loader = shuffled()
    for steps in (20, -1):
        quiet_trainer(tmp_path, callbacks=[found], max_steps=steps, max_epochs=1).fit(Noisy(), loader)
        assert found.result is not None
        assert found.result.applied == (steps == -1)
    assert pickle.loads(pickle.dumps(found)).result == found.result


def test_trial_runs_of_a_tuner_are_no_training(tmp_path: Path) -> None:
    class WithRate(Noisy):
        lr = 1e-5

    tuner = LearningRateFinder(num_training_steps=20, min_lr=1e-9, max_lr=1e-6)
    watch = Watch()
    quiet_trainer(tmp_path, callbacks=[tuner, found := finder(), watch]).fit(WithRate(), shuffled())
    assert found.result is not None
    assert found.result.applied
    assert watch.workers[:24] == [0] * 24


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"overfit_batches": 5}])
def test_it_stays_out_of_runs_that_are_no_trainings(tmp_path: Path, options: dict[str, Any]) -> None:
    train(tmp_path, [found := finder()], shuffled(Samples(50)), 0.0, **options)
    assert found.result is None


def test_a_variable_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_DISABLE", "1")
    train(tmp_path, [found := finder()], shuffled(Samples(50)), 0.0)
    assert found.result is None


def test_a_training_that_is_too_short_says_so(tmp_path: Path) -> None:
    train(tmp_path, [found := finder()], shuffled(Samples(7)), 0.0)
    assert found.result is not None
    assert "Training ended after 21 steps" in found.result.reason


@pytest.mark.parametrize("logger_type", [CSVLogger, TensorBoardLogger])
def test_the_loggers_learn_the_settings_beside_the_users_hyperparameters(
    tmp_path: Path, logger_type: type[Logger]
) -> None:
    if logger_type is TensorBoardLogger:
        pytest.importorskip("tensorboard")

    class WithHparams(Noisy):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    logger = logger_type(tmp_path)
    quiet_trainer(tmp_path, callbacks=[found := finder()], logger=logger).fit(WithHparams(), shuffled())
    assert found.result is not None
    assert found.result.settings is not None
    written = (Path(str(logger.log_dir)) / "hparams.yaml").read_text()
    assert "width: 3" in written
    assert f"num_workers: {found.result.settings.num_workers}" in written


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_budget_that_is_none_is_refused(budget_s: float) -> None:
    with pytest.raises(ValueError, match="budget_s must be a positive number of seconds"):
        NumWorkersFinder(budget_s=budget_s)
