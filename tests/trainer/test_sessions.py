"""However a run of a Trainer ends, nothing of this package's measuring is left afterwards."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from trainings import Boom, Samples, background_threads, loader

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, NumWorkersFinder, load_report, watch
from lightning_gpu_tools.reports.report import FILE_NAME, RUNNING
from lightning_gpu_tools.trainer.wrappers import Wrappers, _StandIn

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
FAILS_AT = 3


def fail(*args: Any, **kwargs: Any) -> None:
    raise Boom("at the end")


def interrupt(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def leave(*args: Any, **kwargs: Any) -> None:
    sys.exit(3)


class Acting(Samples):
    """Samples of which one does something before it is loaded."""

    def __init__(self, act: Callable[[], Any] = lambda: None) -> None:
        super().__init__(6)
        self.act = act

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == FAILS_AT:
            self.act()
        return super().__getitem__(index)


class Runs:
    """Runs of Trainers of one package, with or without callbacks of this one."""

    def __init__(self, package: str, folder: Path, *, is_measured: bool) -> None:
        self.pl: Any = importlib.import_module(package)
        self.tuner: Any = importlib.import_module(f"{package}.tuner")
        self.folder = folder
        self.is_measured = is_measured

    def model(self, act: Callable[[], Any] = lambda: None, validate: Callable[[], Any] = lambda: None) -> Any:
        class Model(self.pl.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)
                self.lr, self.batch_size = 1e-6, 1

            def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
                if batch_idx == FAILS_AT:
                    act()
                loss: torch.Tensor = self.layer(batch).square().mean()
                return loss

            def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
                validate()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=self.lr)

            def train_dataloader(self) -> Any:
                return loader(Acting(), batch_size=self.batch_size)

            def val_dataloader(self) -> Any:
                return loader(Samples(1))

        return Model()

    def acting(self, **hooks: Callable[..., Any]) -> Any:
        class Callback(self.pl.Callback):  # type: ignore[misc, name-defined]
            state_key = str(sorted(hooks))

        callback = Callback()
        for name, hook in hooks.items():
            setattr(callback, name, hook)
        return callback

    def trainer(self, *before: Any, after: Any = (), **options: Any) -> Any:
        ours = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(), NumWorkersFinder()] if self.is_measured else []
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": self.folder,
        }
        return self.pl.Trainer(**{**defaults, **options}, callbacks=[*before, *ours, *after])


def completes(runs: Runs) -> None:
    runs.trainer().fit(runs.model(), loader(Samples(6)), loader(Samples(1)))


def fails_in_the_step(runs: Runs) -> None:
    runs.trainer().fit(runs.model(fail))


def fails_in_the_dataset(runs: Runs) -> None:
    runs.trainer().fit(runs.model(), loader(Acting(fail)))


def fails_in_validation(runs: Runs) -> None:
    runs.trainer(num_sanity_val_steps=0).fit(runs.model(validate=fail), loader(Samples(6)), loader(Samples(1)))


def fails_in_the_sanity_check(runs: Runs) -> None:
    runs.trainer().fit(runs.model(validate=fail), loader(Samples(6)), loader(Samples(1)))


def is_interrupted(runs: Runs) -> None:
    runs.trainer().fit(runs.model(interrupt))


def leaves(runs: Runs) -> None:
    runs.trainer().fit(runs.model(leave))


def fails_in_setup_before_ours(runs: Runs) -> None:
    runs.trainer(runs.acting(setup=fail)).fit(runs.model())


def fails_in_setup_after_ours(runs: Runs) -> None:
    runs.trainer(after=[runs.acting(setup=fail)]).fit(runs.model())


def fails_in_teardown_before_ours(runs: Runs) -> None:
    runs.trainer(runs.acting(teardown=fail)).fit(runs.model())


def fails_in_on_exception_before_ours(runs: Runs) -> None:
    runs.trainer(runs.acting(on_exception=fail)).fit(runs.model(leave))


def lr_find_fails(runs: Runs) -> None:
    tuner = runs.tuner.Tuner(runs.trainer())
    tuner.lr_find(runs.model(), loader(Acting(fail)), early_stop_threshold=None, num_training=5)


def learning_rate_finder_fails(runs: Runs) -> None:
    finder = runs.pl.callbacks.LearningRateFinder(early_stop_threshold=None, num_training_steps=5)
    runs.trainer(after=[finder]).fit(runs.model(), loader(Acting(fail)))


def scale_batch_size_fails(runs: Runs) -> None:
    runs.tuner.Tuner(runs.trainer()).scale_batch_size(runs.model(fail), steps_per_trial=5, init_val=1)


def tuner_finds(runs: Runs) -> None:
    tuner, model = runs.tuner.Tuner(runs.trainer()), runs.model()
    tuner.scale_batch_size(model, steps_per_trial=2, max_trials=2)
    tuner.lr_find(model, early_stop_threshold=None, num_training=5)


def loses_its_callbacks(runs: Runs) -> None:
    take_out = runs.acting(on_train_batch_end=lambda trainer, *args: trainer.callbacks.clear())
    runs.trainer(take_out).fit(runs.model())


def begins_another_trainer(runs: Runs) -> None:
    def train(*args: Any) -> None:
        with suppress(Boom):
            fails_in_the_step(runs)

    runs.trainer(runs.acting(on_train_epoch_start=train)).fit(runs.model())


def evaluates_within(runs: Runs) -> None:
    def evaluate(trainer: Any, model: Any) -> None:
        trainer.validate(model, loader(Samples(1)), verbose=False)

    runs.trainer(runs.acting(on_train_epoch_end=evaluate)).fit(runs.model())


def trains_again(runs: Runs) -> None:
    trainer = runs.trainer()
    with suppress(Boom):
        trainer.fit(runs.model(fail))
    trainer.fit(runs.model())


def forks(runs: Runs) -> None:
    child: list[int] = []

    def fork() -> None:
        child.append(os.fork())
        if not child[0]:
            sys.exit(3)  # through the fit
        assert os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1]) == 3

    home = os.getpid()
    try:
        runs.trainer().fit(runs.model(fork))
    finally:
        if os.getpid() != home:
            os._exit(3 if says_that_it_runs(runs.folder) else 4)


def says_that_it_runs(folder: Path) -> bool:
    return not (folder / FILE_NAME).exists() or load_report(folder).outcome.startswith(RUNNING)


ENDINGS: dict[Callable[[Runs], None], type[BaseException] | None] = {
    completes: None,
    fails_in_the_step: Boom,
    fails_in_the_dataset: Boom,
    fails_in_validation: Boom,
    fails_in_the_sanity_check: Boom,
    is_interrupted: SystemExit,
    leaves: SystemExit,
    fails_in_setup_before_ours: Boom,
    fails_in_setup_after_ours: Boom,
    fails_in_teardown_before_ours: Boom,
    fails_in_on_exception_before_ours: Boom,
    lr_find_fails: Boom,
    learning_rate_finder_fails: Boom,
    scale_batch_size_fails: Boom,
    tuner_finds: None,
    loses_its_callbacks: None,
    begins_another_trainer: None,
    evaluates_within: AssertionError,  # of Lightning
    trains_again: None,
    forks: None,
}


def global_state() -> dict[str, Any]:
    """Return what a training may have changed in this process."""
    calls = [importlib.import_module(f"{package}.trainer.call") for package in PACKAGES]
    names = ("_interrupt", "_call_teardown_hook", "_call_and_handle_interrupt")
    return {
        "threads": sorted(one.name for one in threading.enumerate() if type(one).__name__ != "TMonitor"),  # of tqdm
        "calls": [getattr(module, name) for module in calls for name in names],
        "fetch": torch.utils.data._utils.fetch._MapDatasetFetcher.fetch,
        "backward": torch.autograd.backward,
        "signals": {number: _name(signal.getsignal(number)) for number in signal.valid_signals()},
        "hooks": [sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile()],
        "meta_path": list(sys.meta_path),
        "gc": [*gc.callbacks, gc.isenabled()],
        "warnings": [*warnings.filters, warnings.showwarning],
        "timer": [faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later],
    }


def _name(handler: Any) -> str:
    return getattr(handler, "__qualname__", None) or str(getattr(handler, "name", type(handler).__name__))


def stand_ins() -> list[str]:
    """Return the methods of any object that still have a stand-in."""
    found = [one for one in gc.get_objects() if isinstance(one, _StandIn)]
    return [f"{type(one.owner).__name__}.{one.name}" for one in found if vars(one.owner).get(one.name) is one]


def run(ending: Callable[[Runs], None], runs: Runs) -> tuple[type[BaseException] | None, dict[str, Any]]:
    """Return how a run ends and what it leaves; Lightning itself ignores Ctrl-C after it."""
    before = signal.getsignal(signal.SIGINT)
    error = None
    try:
        ending(runs)
    except BaseException as raised:  # noqa: BLE001 - also SystemExit
        error = type(raised)
    left = global_state()
    signal.signal(signal.SIGINT, before)
    return error, left


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_left_however_a_run_ends(tmp_path: Path, package: str, ending: Callable[[Runs], None]) -> None:
    before = stand_ins()  # of trainers that earlier tests keep
    alone = run(ending, Runs(package, tmp_path / "alone", is_measured=False))
    measured = run(ending, Runs(package, tmp_path / "measured", is_measured=True))
    assert alone[0] is ENDINGS[ending]
    assert measured == alone
    assert background_threads() == []
    assert not Counter(stand_ins()) - Counter(before)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_is_collected_after_its_run(tmp_path: Path) -> None:
    runs = Runs(PACKAGES[0], tmp_path, is_measured=True)
    trainer = runs.trainer()
    with pytest.raises(Boom):
        trainer.fit(runs.model(fail))
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore")
def test_a_run_whose_callbacks_were_taken_out_has_its_report(tmp_path: Path) -> None:
    for ending, outcome in ((loses_its_callbacks, "completed"), (lr_find_fails, "stopped by Boom at step 0")):
        folder = tmp_path / ending.__name__
        run(ending, Runs(PACKAGES[0], folder, is_measured=True))
        assert load_report(folder).outcome.startswith(outcome)


def test_a_child_that_is_forked_in_a_loop_leaves_it_alone(tmp_path: Path) -> None:
    with watch(folder=str(tmp_path)) as running:
        for number, _ in enumerate(running.batches(loader(Samples(6)))):
            if number == FAILS_AT and not (child := os.fork()):
                running.__exit__(Boom, Boom(), None)
                os._exit(3 if says_that_it_runs(tmp_path) else 4)
            if number == FAILS_AT:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert load_report(tmp_path).outcome == "completed"
    assert background_threads() == []


class Owner:
    def method(self) -> list[str]:
        return []


def naming(name: str) -> Callable[[Callable[..., list[str]]], Callable[..., list[str]]]:
    return lambda method: lambda *args: [name, *method(*args)]


@pytest.mark.parametrize("is_class", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_wrappers_come_off_in_any_order(is_class: bool, order: tuple[int, ...]) -> None:
    owner: Any = type("Own", (Owner,), {"method": Owner.method}) if is_class else Owner()
    call = (lambda: owner().method()) if is_class else (lambda: owner.method())
    before = dict(vars(owner))
    wrappers = [Wrappers() for _ in range(3)]
    for number, one in enumerate(wrappers):
        one.put(owner, "method", naming(str(number)))
    on = ["2", "1", "0"]
    assert call() == on
    for number in order:
        wrappers[number].undo()
        on.remove(str(number))
        assert call() == on
    assert dict(vars(owner)) == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_mock_of_the_users_is_as_before(order: tuple[int, ...]) -> None:
    owner = Mock()
    owner.method.return_value = []
    method = owner.method
    wrappers = [Wrappers() for _ in order]
    for number, one in enumerate(wrappers):
        one.put(owner, "method", naming(str(number)))
    assert owner.method() == ["1", "0"]
    for number in order:
        wrappers[number].undo()
    assert owner.method is method
    assert owner.method() == []
    assert owner.mock_calls == [call.method(), call.method()]
