"""The finder in real trainings on the CPU: what it finds, and that it changes nothing else."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import random
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset
from trainings import Boom, Model, Raise, Samples, Stream, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, NumWorkersFinder
from lightning_gpu_tools.loaders.random_state import random_state

# A batch takes three times as long as a step, and both are waiting, which no load of the machine makes shorter, so that
# workers are faster than none whatever else the machine does.
LOAD_S, STEP_S = 0.024, 0.008
COUNT = 700


class Slow(Samples):
    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count, time.sleep, LOAD_S)


def finder(**options: Any) -> NumWorkersFinder:
    return NumWorkersFinder(**{"budget_s": 4.0, **options})


class Watch(Callback):
    """Notes what a training does from step to step."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.states: list[Any] = []
        self.workers: list[int] = []
        self.validation_workers: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.batches.append(batch.flatten().tolist())
        loader = trainer.train_dataloader
        self.workers.append(getattr(loader, "num_workers", -1))

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self.states.append(random_state())

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validation_workers.append(trainer.val_dataloaders.num_workers)


class Noisy(Model):
    """A model whose steps draw random numbers, so that another state of the generators gives other weights."""

    def __init__(self, step_s: float = STEP_S) -> None:
        super().__init__(time.sleep, step_s)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        noise = torch.rand(1) + random.random() + float(np.random.rand())
        return super().training_step(batch * noise, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-5)


def train(
    folder: Path, callbacks: list[Callback], loader: Callable[[], Any], step_s: float = STEP_S, **options: Any
) -> tuple[Watch, list[torch.Tensor]]:
    seed_everything(7)
    watch, module = Watch(), Noisy(step_s)
    quiet_trainer(folder, callbacks=[*callbacks, watch], **options).fit(module, loader())
    return watch, [parameter.detach().clone() for parameter in module.parameters()]


def shuffled(dataset: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Slow(), **{"batch_size": 1, "shuffle": True, **options})


def as_without(folder: Path, **options: Any) -> tuple[Watch, list[torch.Tensor]]:
    """Train without the finder, on the same samples, quickly loaded."""
    trainer = {name: options.pop(name) for name in ("max_epochs", "limit_train_batches") if name in options}
    return train(folder, [], lambda: shuffled(Samples(COUNT), **options), 0.0, **trainer)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "persistent_workers": True}, {"num_workers": 1, "prefetch_factor": 3}]
)
def test_a_slow_loader_gets_workers_and_the_training_is_the_same_to_the_bit(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    epochs = {"max_epochs": 2, "limit_train_batches": 450}
    tuned = train(tmp_path, [found := finder()], lambda: shuffled(**options), **epochs)
    as_usual = as_without(tmp_path, **options, **epochs)
    result = found.result
    assert result is not None
    assert result.applied
    assert result.confirmed
    assert result.settings is not None
    assert result.settings.num_workers >= 2
    assert result.seconds < 6  # the budget, and the trial of the user's settings
    assert tuned[0].workers[-1] == result.settings.num_workers
    assert len({trial.settings.num_workers for trial in result.trials}) >= 3
    assert tuned[0].batches == as_usual[0].batches
    assert tuned[0].states == as_usual[0].states
    assert all(map(torch.equal, tuned[1], as_usual[1]))


def test_without_apply_it_is_measured_and_the_users_settings_come_back(tmp_path: Path) -> None:
    watch, _ = train(tmp_path, [found := finder(apply=False)], shuffled)
    assert found.result is not None
    assert found.result.settings is not None
    assert found.result.settings.num_workers >= 2
    assert not found.result.applied
    assert found.result.confirmed is None
    assert max(watch.workers) >= 2
    assert watch.workers[-1] == 0


def test_a_loader_that_feeds_the_step_is_left_as_it_is(tmp_path: Path) -> None:
    watch, _ = train(tmp_path, [found := finder()], lambda: shuffled(Samples(60), num_workers=1), 0.1)
    assert found.result is not None
    assert found.result.settings == found.result.users
    assert "no settings can make it 5 % faster" in found.result.reason
    assert set(watch.workers) == {1}


def test_epochs_too_short_to_measure_are_said_to_be(tmp_path: Path) -> None:
    train(tmp_path, [found := finder()], lambda: shuffled(Slow(4), num_workers=2), max_epochs=8)
    assert found.result is not None
    assert "epochs of 4 steps are over before 2 workers" in found.result.reason
    assert not found.result.applied


def test_what_was_found_holds_for_loaders_that_are_made_again_and_for_validation(tmp_path: Path) -> None:
    class Data(LightningDataModule):
        made = 0

        def train_dataloader(self) -> DataLoader[Any]:
            self.made += 1
            return shuffled(Slow(250))

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Slow(40), batch_size=1)

    seed_everything(7)
    watch, data = Watch(), Data()
    trainer = quiet_trainer(
        tmp_path, callbacks=[found := finder(), watch], max_epochs=5, reload_dataloaders_every_n_epochs=1
    )
    trainer.fit(Noisy(), datamodule=data)
    result = found.result
    assert result is not None
    assert result.applied
    assert result.settings is not None
    assert data.made == 5
    assert watch.workers[-250:] == [result.settings.num_workers] * 250
    assert watch.validation_workers[0] == 0
    assert watch.validation_workers[-1] == result.settings.num_workers
    assert not result.settings.persistent_workers


def test_of_several_loaders_the_first_that_can_be_changed_is_tuned(tmp_path: Path) -> None:
    loaders = {"stream": DataLoader(Stream(Samples(COUNT))), "slow": shuffled(), "fast": DataLoader(Samples(COUNT))}

    class Both(Noisy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch["slow"], batch_idx)

    class Flat(Watch):
        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.workers.append([trainer.train_dataloader[name].num_workers for name in loaders])

    watch = Flat()
    quiet_trainer(tmp_path, callbacks=[found := finder(), watch]).fit(Both(), loaders)
    assert found.result is not None
    assert found.result.settings is not None
    assert found.result.applied
    assert watch.workers[-1] == [0, found.result.settings.num_workers, 0]


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (lambda: DataLoader(Stream(Samples(50))), "its dataset is iterable"),
        (lambda: OwnKind(), "OwnKind, not a torch DataLoader"),
        (lambda: shuffled(Samples(50), num_workers=1, in_order=False), "in_order=False"),
        (lambda: Stateful(Samples(50)), "keeps its position"),
        (lambda: Endless(Samples(50)), "a Endless is iterated in a way of its own"),
    ],
)
def test_what_cannot_be_changed_is_measured_and_left_alone(
    tmp_path: Path, loader: Callable[[], Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        watch, _ = train(tmp_path, [found := finder()], loader, limit_train_batches=50)
    assert len(watch.batches) == 50
    assert found.result is not None
    assert why in found.result.reason
    assert found.result.wait_share is not None
    assert 0 < found.result.wait_share < 1
    assert not found.result.applied
    assert caplog.text.count(why) == 1


@pytest.mark.parametrize("finder_first", [True, False])
@pytest.mark.parametrize("failing", [True, False])
def test_a_loader_left_alone_leaves_no_wrapper_and_hides_no_error(
    tmp_path: Path, finder_first: bool, failing: bool
) -> None:
    callbacks = [finder(), GPUUtilizationAdvisor()]
    raising = [Raise(at_step=5)] if failing else []
    trainer = quiet_trainer(tmp_path, callbacks=[*(callbacks if finder_first else callbacks[::-1]), *raising])
    with pytest.raises(Boom) if failing else nullcontext():
        trainer.fit(Model(), DataLoader(Stream(Samples(9))))
    owners = (trainer.fit_loop.epoch_loop, trainer.strategy)
    assert [name for owner in owners for name in vars(owner) if callable(getattr(type(owner), name, None))] == []


class Doubling(DataLoader[Any]):
    """Begins with what it iterates when the first batch is asked for."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield 2 * batch


def test_a_loader_that_does_more_with_its_batches_is_tuned(tmp_path: Path) -> None:
    watch, _ = train(tmp_path, [found := finder(budget_s=1.0)], lambda: Doubling(Slow(120)))
    assert found.result is not None
    assert len({trial.settings.num_workers for trial in found.result.trials}) > 1
    assert [batch[0] for batch in watch.batches] == [2.0 * float(Samples(120)[i][0]) for i in range(120)]


def test_a_dataset_with_an_open_file_is_left_alone(tmp_path: Path) -> None:
    class Open(Slow):
        def __init__(self, path: Path) -> None:
            super().__init__(60)
            path.touch()
            self.reader = path.open()

    loader = shuffled(Open(tmp_path / "samples"))
    watch, _ = train(tmp_path, [found := finder()], lambda: loader)
    loader.dataset.reader.close()  # type: ignore[attr-defined]
    assert found.result is not None
    assert "left as it is: the dataset holds an open file (dataset.reader)" in found.result.reason
    assert set(watch.workers) == {0}


def test_an_object_of_the_users_that_holds_loaders_has_his_own_again_afterwards(tmp_path: Path) -> None:
    loaders = [shuffled(Samples(9)), shuffled(Samples(9))]
    both, watched = (CombinedLoader(one, "max_size_cycle") for one in loaders)
    trainer = quiet_trainer(tmp_path, callbacks=[finder()])
    trainer.fit(Model(), both, watched)
    assert both.flattened + watched.flattened == loaders


def test_loaders_that_were_replaced_are_let_go(tmp_path: Path) -> None:
    datasets: list[weakref.ref[Any]] = []

    def loader() -> DataLoader[Any]:
        datasets.append(weakref.ref(dataset := Samples(4)))
        return DataLoader(dataset)

    class Data(LightningDataModule):
        def train_dataloader(self) -> list[DataLoader[Any]]:
            return [loader(), loader()]

        def val_dataloader(self) -> DataLoader[Any]:
            return loader()

    class Count(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
            gc.collect()
            alive.append(sum(dataset() is not None for dataset in datasets))

    class First(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[0], batch_idx)

    alive: list[int] = []
    trainer = quiet_trainer(tmp_path, callbacks=[finder(), Count()], max_epochs=4, reload_dataloaders_every_n_epochs=1)
    trainer.fit(First(), datamodule=Data())
    assert alive[-1] == alive[1]


def test_the_limit_of_an_epoch_is_no_length_where_there_are_several_loaders(tmp_path: Path) -> None:
    class First(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            switch = found._fit._tuned  # type: ignore[union-attr]
            assert switch is not None
            pids.update(switch.inner.pids if switch.inner is not None else [])
            if batch_idx == 2:
                switch.use(dataclasses.replace(switch.users, num_workers=1, prefetch_factor=2))
            return super().training_step(batch[0], batch_idx)

    pids: set[int] = set()
    loaders = [DataLoader(Samples(20)), DataLoader(Samples(40))]
    trainer = quiet_trainer(tmp_path, callbacks=[found := finder()], limit_train_batches=0.5)
    trainer.fit(First(), loaders)
    assert len(pids) == 1


class OwnKind:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(1, 4)] * 50)


class Stateful(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Endless(DataLoader[Any]):
    """Keeps one iterator for ever, as some loaders do."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept = DataLoader.__iter__(self)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        while True:
            yield from self.kept
            self.kept = DataLoader(self.dataset).__iter__()


def test_a_worker_that_the_kernel_kills_costs_nothing_but_its_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = os.getpid()

    class TooMuch(Slow):
        def __getitem__(self, index: int) -> torch.Tensor:
            if os.getpid() != home:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    with caplog.at_level("INFO"):
        tuned = train(tmp_path, [found := finder()], lambda: shuffled(TooMuch(), num_workers=0))
    as_usual = as_without(tmp_path)
    assert found.result is not None
    assert found.result.settings == found.result.users
    assert "SIGKILL" in caplog.text
    assert tuned[0].batches == as_usual[0].batches
    assert all(map(torch.equal, tuned[1], as_usual[1]))


def test_settings_that_fail_later_are_taken_back(tmp_path: Path) -> None:
    home, late = os.getpid(), {"step": 10**9}

    class Watching(Watch):
        def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
            super().on_train_batch_end(trainer, *arguments)
            if found.result is not None and found.result.confirmed and found._fit is not None:
                late["step"] = min(late["step"], trainer.global_step)
                if trainer.global_step == late["step"] + 5:
                    assert found._fit._tuned is not None
                    assert found._fit._tuned.inner is not None
                    os.kill(found._fit._tuned.inner.pids[0], signal.SIGKILL)

    seed_everything(7)
    found, watch = finder(), Watching()
    with pytest.warns(UserWarning, match="SIGKILL.*so yours are back"):
        quiet_trainer(tmp_path, callbacks=[found, watch]).fit(Noisy(), shuffled())
    assert os.getpid() == home
    assert len(watch.batches) == COUNT
    assert watch.workers[-1] == 0
    assert found.result is not None
    assert found.result.confirmed is False


def test_the_training_ends_while_settings_are_tried(tmp_path: Path) -> None:
    found = finder()
    trainer = quiet_trainer(tmp_path, callbacks=[found, Raise(at_step=60)])
    with pytest.raises(Boom):
        trainer.fit(Noisy(), shuffled())
    assert found.result is not None
    assert "Training ended before" in found.result.reason
    assert found.result.trials
    assert "process_dataloader" not in vars(trainer.strategy)
    loader = shuffled()
    trainer = quiet_trainer(tmp_path, callbacks=[found], max_steps=30)
    trainer.fit(Model(), loader)
    assert "_get_iterator" not in vars(loader)
    assert loader.num_workers == 0


def test_a_second_fit_starts_anew_and_the_callback_pickles(tmp_path: Path) -> None:
    found = pickle.loads(pickle.dumps(finder()))
    loader = shuffled()
    for steps in (60, -1):
        quiet_trainer(tmp_path, callbacks=[found], max_steps=steps, max_epochs=1).fit(Noisy(), loader)
        assert found.result is not None
        assert found.result.applied == (steps == -1)
    assert loader.num_workers == 0
    assert pickle.loads(pickle.dumps(found)).result == found.result


def test_trial_runs_of_a_tuner_are_no_training(tmp_path: Path) -> None:
    class WithRate(Noisy):
        lr = 1e-5

    tuner = LearningRateFinder(num_training_steps=20, min_lr=1e-9, max_lr=1e-6)
    watch = Watch()
    quiet_trainer(tmp_path, callbacks=[tuner, found := finder(), watch]).fit(WithRate(), shuffled())
    assert found.result is not None
    assert found.result.applied
    assert len(watch.batches) == COUNT
    assert watch.workers[0] == 0


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"overfit_batches": 5}])
def test_it_stays_out_of_runs_that_are_no_trainings(tmp_path: Path, options: dict[str, Any]) -> None:
    train(tmp_path, [found := finder()], lambda: shuffled(Samples(50)), **options)
    assert found.result is None


def test_a_variable_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_DISABLE", "1")
    train(tmp_path, [found := finder()], lambda: shuffled(Samples(50)))
    assert found.result is None


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
