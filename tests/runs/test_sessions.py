"""Nothing of this package's measuring is left after a run of a Trainer, however the run ends."""

import gc
import importlib
import os
import signal
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import quiet_options
from process_changes import changed, snapshot
from trainings import ActingSamples, Boom, Samples, background_threads, loader

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, NumWorkersFinder, load_report, watch
from lightning_gpu_tools.patches import _StandIn
from lightning_gpu_tools.reports.report import FILE_NAME, RUNNING

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
FAILS_AT = 3

Act = Callable[..., Any]


def nothing() -> None:
    """Act in no way."""


def fail(*args: Any, **kwargs: Any) -> None:
    raise Boom("at the end")


def interrupt() -> None:
    raise KeyboardInterrupt


class Runs:
    """Runs of Trainers of one package, with or without callbacks of this one."""

    def __init__(self, package: str, folder: Path, *, is_measured: bool) -> None:
        self.pl: Any = importlib.import_module(package)
        self.tuner: Any = importlib.import_module(f"{package}.tuner")
        self.folder = folder
        self.is_measured = is_measured

    def model(self, step: Act = nothing) -> Any:
        class Model(self.pl.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)
                self.lr, self.batch_size = 1e-6, 1

            def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
                if batch_idx == FAILS_AT:
                    step()
                loss: torch.Tensor = self.layer(batch).square().mean()
                return loss

            def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
                self.layer(batch)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=self.lr)

            def train_dataloader(self) -> Any:
                return loader(Samples(6), batch_size=self.batch_size)

            def val_dataloader(self) -> Any:
                return loader(Samples(1))

        return Model()

    def acting(self, **hooks: Act) -> Any:
        """Return a callback with these hooks."""
        return self.pl.callbacks.LambdaCallback(**hooks)

    def trainer(self, *before: Any, after: Any = ()) -> Any:
        """Return a Trainer with callbacks before and after those of this package."""
        ours = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(), NumWorkersFinder()] if self.is_measured else []
        return self.pl.Trainer(**quiet_options(self.folder), callbacks=[*before, *ours, *after])

    def fit(self, *before: Any, after: Any = (), step: Act = nothing) -> None:
        self.trainer(*before, after=after).fit(self.model(step))


def lr_find_fails(runs: Runs) -> None:
    tuner = runs.tuner.Tuner(runs.trainer())
    tuner.lr_find(runs.model(), loader(ActingSamples(6, FAILS_AT, fail)), early_stop_threshold=None, num_training=5)


def begins_another_trainer(runs: Runs) -> None:
    def train(*args: Any) -> None:
        with suppress(Boom):
            runs.fit(step=fail)

    runs.fit(runs.acting(on_train_epoch_start=train))


def says_that_it_runs(folder: Path) -> bool:
    return not (folder / FILE_NAME).exists() or load_report(folder).outcome.startswith(RUNNING)


# What a run does, and the error with which it ends.
ENDINGS: dict[str, tuple[Callable[[Runs], None], type[BaseException] | None]] = {
    "completes": (lambda runs: runs.fit(), None),
    "fails in the step": (lambda runs: runs.fit(step=fail), Boom),
    "is interrupted": (lambda runs: runs.fit(step=interrupt), SystemExit),
    "fails in setup after ours": (lambda runs: runs.fit(after=[runs.acting(setup=fail)]), Boom),
    "fails in teardown before ours": (lambda runs: runs.fit(runs.acting(teardown=fail)), Boom),
    "fails in on_exception before ours": (lambda runs: runs.fit(runs.acting(on_exception=fail), step=sys.exit), Boom),
    "lr_find fails": (lr_find_fails, Boom),
    "begins another Trainer": (begins_another_trainer, None),
}


def stand_ins() -> list[str]:
    """Return the methods of any object that still have a stand-in."""
    # Not isinstance, which asks weak proxies for the class of what they stand for.
    found = [one for one in gc.get_objects() if issubclass(type(one), _StandIn)]
    return [f"{type(one.owner).__name__}.{one.name}" for one in found if vars(one.owner).get(one.name) is one]


def run(act: Callable[[Runs], None], runs: Runs) -> tuple[type[BaseException] | None, set[str]]:
    """Return how a run ends, and what differs in this process after it; Lightning itself ignores Ctrl-C then."""
    handler, before, error = signal.getsignal(signal.SIGINT), snapshot({}), None
    try:
        act(runs)
    except BaseException as raised:  # noqa: BLE001 - also SystemExit
        error = type(raised)
    left = changed(before, snapshot({}))
    signal.signal(signal.SIGINT, handler)
    return error, left


@pytest.mark.parametrize(
    ("package", "ending"), [*((PACKAGES[0], ending) for ending in ENDINGS), (PACKAGES[1], "fails in the step")]
)
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_left_however_a_run_ends(tmp_path: Path, package: str, ending: str) -> None:
    act, error = ENDINGS[ending]
    before = stand_ins()  # of trainers that earlier tests keep
    error_alone, left_alone = run(act, Runs(package, tmp_path / "alone", is_measured=False))
    error_measured, left = run(act, Runs(package, tmp_path / "measured", is_measured=True))
    assert (error_alone, error_measured) == (error, error)
    assert left <= left_alone
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
