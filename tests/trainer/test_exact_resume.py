"""Trainings that are killed at some step and resumed with other random numbers, against one that is not."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from loader_switching import shorten_trials
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torchmetrics import MeanMetric

from lightning_gpu_tools import ExactResume, NumWorkersFinder, PortableCheckpointIO
from lightning_gpu_tools.errors import CheckpointMismatchError
from lightning_gpu_tools.loaders import plan

SAMPLES, BATCH = 26, 2
PROGRAM = Path(__file__).parent.parent / "exact_training.py"


class Photos(Dataset[torch.Tensor]):
    """Samples with augmentation by each of the three global generators."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + np.random.randn() + torch.rand(4)
        return (index + noise).float() / 30


class Whole(Photos):
    """Samples that are fetched by batch."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Photos()[index] for index in range(SAMPLES))


class Shuffled(Sampler[int]):
    """A sampler of a user that draws index by index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield np.random.randint(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES


class OwnGenerator(Shuffled):
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(self.rng.random() * SAMPLES)


class Counting(Shuffled):
    """A sampler that counts its epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(SAMPLES), SAMPLES))


class Model(LightningModule):
    """Dropout, draws on the host, two schedulers, and metrics that one of them follows."""

    monitor = "loss_epoch"

    def __init__(self, load: Callable[[], Any], validation: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
        self.load, self.validation = load, validation
        self.mean = MeanMetric()
        self.hooks: torch.Tensor
        self.register_buffer("hooks", torch.zeros(3))

    def loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, (list, tuple)):
            batch = torch.cat([part for part in batch if part is not None])
        if isinstance(batch, dict):
            batch = torch.cat([part for part in batch.values() if part is not None])
        return self.layer(batch.reshape(-1, 4)).square().mean() * (1 + random.random() + np.random.randn() / 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=BATCH)
        self.mean(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) + torch.rand(()), batch_size=BATCH)

    def on_train_epoch_start(self) -> None:
        self.hooks[0] += 1

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.hooks[1] += 1

    def on_train_epoch_end(self) -> None:
        self.hooks[2] += 1

    def train_dataloader(self) -> Any:
        return self.load()

    def val_dataloader(self) -> Any:
        return self.validation() if self.validation else []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": self.monitor, "interval": "epoch"}]


class Manual(Model):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        scheduler: Any = self.lr_schedulers()
        scheduler.step(self.trainer.callback_metrics["loss_epoch"])


class Kill(Callback):
    """An end of the process, as far as the rest of the training is concerned."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.step:
            raise RuntimeError("killed")


def everything(trainer: Trainer, model: LightningModule) -> dict[str, Any]:
    """Return weights, optimizers, schedulers, counters and the next random numbers."""
    saved = trainer._checkpoint_connector.dump_checkpoint()
    kept = {name: saved[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")}
    drawn = torch.rand(2).tolist(), random.random(), np.random.rand()
    return {**kept, "drawn": drawn, "metrics": {**trainer.callback_metrics}}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def train(
    folder: Path,
    model: LightningModule,
    seed: int,
    ckpt: Any = None,
    more: Sequence[Callback] = (),
    saves: bool = True,
    plugins: Sequence[Any] = (),
    **options: Any,
) -> Trainer:
    seed_everything(seed)
    saving = ModelCheckpoint(folder, every_n_train_steps=1 if saves else 10**9, save_top_k=-1, filename="{step}")
    options = {"max_epochs": 3, **options}
    own = [] if any(isinstance(callback, ExactResume) for callback in more) else [ExactResume()]
    callbacks = [*more, *own, saving]
    trainer = Trainer(
        default_root_dir=folder,
        callbacks=callbacks,
        plugins=list(plugins),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, ckpt_path=ckpt)
    return trainer


def check(
    folder: Path,
    make: Callable[[], LightningModule],
    steps: list[int],
    again: Any = None,
    callbacks: Callable[[], list[Callback]] = list,
    **options: Any,
) -> None:
    """Compare a training with those that are killed after these steps and go on."""
    seed_everything(1)
    model = make()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = everything(train(folder / "whole", model, 7, more=callbacks(), **options), model)
    for step in steps:
        model = make()
        model.load_state_dict(weights)
        with pytest.raises(RuntimeError, match="killed"):
            train(folder / f"{step}", model, 7, more=[*callbacks(), Kill(step)], **options)
        ckpt = max((folder / f"{step}").glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
        model = (again or make)()
        resumed = everything(train(folder / f"{step}", model, 99, ckpt, more=callbacks(), **options), model)
        differ = [name for name in expected if not same(expected[name], resumed[name])]
        assert not differ, (step, differ)


def plain(dataset: Any = Photos, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), **{"batch_size": BATCH, **options})


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": plain,
    "shuffled": partial(plain, shuffle=True),
    "workers": partial(plain, shuffle=True, num_workers=2),
    "persistent": partial(plain, shuffle=True, num_workers=2, persistent_workers=True),
    "sampler": lambda: plain(sampler=Shuffled()),
    "sampler and workers": lambda: plain(sampler=Shuffled(), num_workers=2),
    "sampler with a generator": lambda: plain(sampler=OwnGenerator(np.random.default_rng(3))),
    "sampler with Python's": lambda: plain(sampler=OwnGenerator(random.Random(3)), num_workers=1),
    "sampler that counts": lambda: plain(sampler=Counting()),
    "generator": lambda: plain(shuffle=True, generator=torch.Generator().manual_seed(3)),
    "batch sampler": lambda: DataLoader(Photos(), batch_sampler=BatchSampler(RandomSampler(Photos()), BATCH, False)),
    "no batches": partial(plain, batch_size=None),
    "whole batches": partial(plain, Whole, shuffle=True, num_workers=2),
    "several": lambda: {"few": plain(partial(Photos, 8), shuffle=True), "many": plain(shuffle=True, num_workers=1)},
    "stream": partial(plain, Stream),
    "stream and workers": partial(plain, Stream, num_workers=2),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path, name: str) -> None:
    seeded = random.Random(name)
    steps = [seeded.randrange(1, 13), seeded.randrange(14, 38)]
    check(tmp_path, lambda: Model(LOADERS[name]), steps)


validated = partial(Model, partial(plain, shuffle=True), plain)
OPTIONS: dict[str, Any] = {
    "at the end of epochs": {},
    "within epochs": {"val_check_interval": 6},
    "not always": {"check_val_every_n_epoch": 2},
    "few batches": {"limit_train_batches": 7},
    "accumulation": {"accumulate_grad_batches": 3},
    "steps": {"max_steps": 30, "max_epochs": -1},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_validation_and_options_of_the_trainer_make_no_difference(tmp_path: Path, name: str) -> None:
    steps = [6, 7, *random.Random(name).sample(range(8, 20), 2), *([30] if name == "reloaded" else [])]
    check(tmp_path, validated, steps, **OPTIONS[name])


def test_manual_optimization_makes_no_difference(tmp_path: Path) -> None:
    check(tmp_path, lambda: Manual(plain), [13, 20])


class ByMetric(Model):
    """A learning rate that follows a torchmetric."""

    monitor = "mean"


@pytest.mark.parametrize("step", [9, 13])
def test_a_torchmetric_goes_on_in_its_epoch_and_at_its_end(tmp_path: Path, step: int) -> None:
    check(tmp_path, lambda: ByMetric(plain), [step])


@pytest.mark.parametrize("workers", [(0, 2), (2, 0), (2, 1)])
def test_the_number_of_workers_may_change(tmp_path: Path, workers: tuple[int, int]) -> None:
    before, after = (lambda count=count: Model(partial(plain, shuffle=True, num_workers=count)) for count in workers)
    check(tmp_path, before, [9], after)


class Unfreezing(BaseFinetuning):
    """A layer that trains from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layer[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layer[0], optimizer, lr=0.01)


class Unscheduled(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "averaging": partial(StochasticWeightAveraging, swa_lrs=0.01, swa_epoch_start=1),
    "accumulation": partial(GradientAccumulationScheduler, {0: 1, 1: 2}),
    "finetuning": Unfreezing,
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_what_callbacks_do_at_the_start_of_an_epoch_is_kept(tmp_path: Path, name: str) -> None:
    check(tmp_path, lambda: Unscheduled(plain), [6, 20, 33], callbacks=lambda: [CALLBACKS[name]()])


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


def test_a_training_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    model = Model(plain)
    hooks, threads = vars(model).keys(), threading.active_count()
    before = set(hooks)
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, model, 7, more=[Kill(3)])
    assert {name for name in set(hooks) - before if name.startswith("on_")} == set()
    assert threading.active_count() == threads


class Slow(Photos):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return super().__getitem__(index)


class Workers(Callback):
    """Notes the number of workers at each step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append(trainer.train_dataloader.num_workers)


@pytest.mark.parametrize("others", [[NumWorkersFinder], [ExactResume, NumWorkersFinder]])
def test_the_finder_changes_workers_and_no_random_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[type[Callback]]
) -> None:
    shorten_trials(monkeypatch.setattr)
    monkeypatch.setattr(plan, "STUDY_STEPS", 8)
    outcomes, workers = [], Workers()
    for more in ([], [workers, *(kind() for kind in others)]):
        seed_everything(1)
        model = Model(partial(plain, Slow, shuffle=True))
        outcomes.append(everything(train(tmp_path, model, 7, more=more), model))
    assert workers.seen[0] == 0
    assert max(workers.seen) > 0
    assert same(*outcomes)


# Signals


class Ask(Callback):
    """A scheduler that sends a signal at a certain batch."""

    def __init__(self, step: int, hook: str, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number
        self.asked = False
        setattr(self, hook, self.ask)

    def ask(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.step:
            self.asked = True
            os.kill(os.getpid(), self.number)


@contextmanager
def stopped_and_resumed(
    folder: Path,
    more: Sequence[Callback],
    plugin: Callable[[], Any] | None = None,
    is_asked: bool = True,
    max_time: str | None = None,
    **options: Any,
) -> Iterator[Callable[[Any], None]]:
    """Train, and train again until it stops; yield a function that goes on from a checkpoint and compares the two."""
    model = validated()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = everything(train(folder / "whole", model, 7, **options), model)
    model = validated()
    model.load_state_dict(weights)
    plugins = [plugin()] if plugin else []
    with pytest.raises(SystemExit) if is_asked else nullcontext() as stopped:
        train(folder / "killed", model, 7, more=more, plugins=plugins, max_time=max_time, **options)
    if stopped is not None:
        assert stopped.value.code == 128 + signal.SIGTERM

    def resume(ckpt: Any) -> None:
        model = validated()
        plugins = [plugin()] if plugin else []
        resumed = everything(train(folder / "killed", model, 99, ckpt=ckpt, plugins=plugins, **options), model)
        assert [name for name in expected if not same(expected[name], resumed[name])] == []

    yield resume


HOOKS = ["on_train_batch_start", "on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end"]


@pytest.mark.follows("To continue, run the same command with fit(..., ckpt_path={}).")
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulation"])
def test_a_training_that_is_asked_to_stop_saves_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hook: str, options: Any
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stopped_and_resumed(tmp_path, [Ask(12, hook)], saves=False, val_check_interval=13, **options) as resume:
        assert signal.getsignal(signal.SIGTERM) == before
        assert [path.name for path in (tmp_path / "killed").glob("*.ckpt*")] == ["last.ckpt"]
        resume(re.search(r"ckpt_path='(.*)'\)", caplog.text)[1])  # type: ignore[index]


def test_a_resumed_run_goes_on_with_the_file_of_the_signal(tmp_path: Path) -> None:
    options: Any = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 2}
    for more in [Ask(3, "on_train_batch_end")], []:
        with pytest.raises(SystemExit) if more else nullcontext():
            saving = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=0, save_last=True)
            Trainer(callbacks=[*more, ExactResume(), saving], **options).fit(Model(plain), ckpt_path="last")
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 25


PLUGINS = [PortableCheckpointIO, AsyncCheckpointIO, lambda: AsyncCheckpointIO(PortableCheckpointIO())]


@pytest.mark.parametrize("make", PLUGINS, ids=["portable", "async", "async portable"])
def test_plugins_that_save_make_no_difference(tmp_path: Path, make: Callable[[], Any]) -> None:
    with stopped_and_resumed(tmp_path, [Ask(20, "on_train_batch_end")], make) as resume:
        resume("last")


class Swap(Callback):
    """Other weights during validation, as averaging has."""

    def on_validation_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.kept = {name: value.clone() for name, value in pl_module.state_dict().items()}
        for value in pl_module.parameters():
            value.data.zero_()

    def on_validation_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        pl_module.load_state_dict({**pl_module.state_dict(), **self.weights()})

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.kept.items() if name.startswith("layer")}


def test_weights_that_are_exchanged_for_validation_are_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Heard(Ask):
        def ask(self, *args: Any, **kwargs: Any) -> None:
            super().ask(*args, **kwargs)
            gives_up_s = time.monotonic() + 60
            while self.asked and said not in caplog.text and time.monotonic() < gives_up_s:
                time.sleep(0.01)

    said = "SIGTERM: validation, in which Swap may hold other weights, has been running for "
    model = validated()
    with pytest.raises(SystemExit):
        train(tmp_path, model, 7, more=[Heard(12, "on_validation_batch_end"), Swap()], saves=False)
    assert said in caplog.text
    saved = torch.load(tmp_path / "last.ckpt")
    assert saved["global_step"] == 14
    assert same(saved["state_dict"]["layer.0.weight"], model.layer[0].weight)
    assert model.layer[0].weight.any()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2], ids=["usual", "another"])
def test_a_job_of_slurm_is_saved_and_requeued_at_the_end_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    environment = {"JOB_ID": "3", "JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in {**environment, "JOB_NODELIST": "localhost"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    model = validated()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    slurm = [SLURMEnvironment(auto_requeue=True, requeue_signal=number)]
    expected = everything(train(tmp_path / "whole", model, 7, saves=False, plugins=slurm), model)
    model = validated()
    model.load_state_dict(weights)
    asking = Ask(20, "on_after_backward", number)
    train(tmp_path / "asked", model, 7, more=[asking], saves=False, plugins=slurm)  # goes on until SLURM ends it
    assert (tmp_path / "said").read_text() == "requeue 3\n"
    model = validated()
    resumed = everything(train(tmp_path / "asked", model, 99, saves=False, plugins=slurm), model)
    assert [name for name in expected if not same(expected[name], resumed[name])] == []


def test_a_training_that_is_asked_before_its_first_step_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path, validated(), 7, more=[Ask(-1, "on_validation_batch_end")], saves=False)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("*.ckpt*"))


def test_time_is_up(tmp_path: Path) -> None:
    class Slow(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 5:
                timer = next(callback for callback in trainer.callbacks if isinstance(callback, Timer))
                timer._duration = 0.0

    with stopped_and_resumed(tmp_path, [Slow()], is_asked=False, max_time="00:01:00:00") as resume:
        resume(tmp_path / "killed" / "last.ckpt")


# Processes


def program(folder: Path, *kill: int, package: str = "lightning.pytorch", ranks: int = 1, workers: int = 0) -> Any:
    """Run ``exact_training.py``, and return its exit code, digest and output."""
    command = [sys.executable, PROGRAM, package, folder, str(ranks), str(workers), *map(str, kill)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=170)
    return ended.returncode, re.findall(r"ENDED (\w+ \d+)", ended.stdout), ended.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_training_after_kill_9_ends_with_the_same_weights(tmp_path: Path, package: str) -> None:
    _, expected, output = program(tmp_path / "whole", package=package)
    assert expected, output
    step = random.randrange(4, 50)
    code, _, output = program(tmp_path / "killed", step, 0, signal.SIGKILL, package=package)
    assert code == -signal.SIGKILL, output
    _, found, output = program(tmp_path / "killed", package=package, workers=1)
    assert found == expected, (step, output)


@pytest.mark.timeout(600)
def test_all_ranks_save_one_step_if_one_of_them_is_asked(tmp_path: Path) -> None:
    _, expected, output = program(tmp_path / "whole", ranks=2)
    assert expected, output
    step = random.randrange(4, 20)
    code, _, output = program(tmp_path / "killed", step, 1, signal.SIGTERM, ranks=2, workers=1)
    assert code == 128 + signal.SIGTERM, output
    assert re.search(r"SIGTERM: saved step \d+ to .*last.ckpt in .* s. To continue, run the same command with ", output)
    _, found, output = program(tmp_path / "killed", ranks=2)
    assert found == expected, (step, output)


LONG_STEP = """
import sys, time
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_gpu_tools import ExactResume

folder = Path(sys.argv[1])

class Long(BoringModel):
    def training_step(self, batch, batch_idx):
        gives_up_s = time.monotonic() + 120
        if batch_idx == 2:
            (folder / "in the step").touch()
            while not (folder / "goes on").exists() and time.monotonic() < gives_up_s:
                time.sleep(0.01)
        return super().training_step(batch, batch_idx)

saving = ModelCheckpoint(folder, every_n_train_steps=2)
Trainer(default_root_dir=folder, logger=False, max_steps=5, callbacks=[ExactResume(), saving]).fit(Long())
"""


def test_what_the_save_waits_for_is_said_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LONG_STEP, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        while process.poll() is None and not (tmp_path / "in the step").exists():
            time.sleep(0.01)
        process.terminate()
        said = next((line for line in process.stdout if "has been running" in line), "")
        assert not (tmp_path / "last.ckpt").exists()
        (tmp_path / "goes on").touch()
        output = process.stdout.read()
    assert re.search(r"SIGTERM: a training step has been running for .* s, and the run saves after that\. ", said), said
    assert re.search(r"The last save took .* s\.$", said), said
    assert "SIGTERM: saved step 3 to" in output
    assert process.returncode == 128 + signal.SIGTERM
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 3


ON_WINDOWS = """
import signal, sys
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

there = type(signal)("signal")
vars(there).update((name, value) for name, value in vars(signal).items() if name not in ("SIGUSR1", "SIGCHLD"))
sys.modules.update(signal=there, fcntl=None, pwd=None)  # for what is imported from here on
from lightning_gpu_tools import ExactResume

trainer = Trainer(max_steps=3, logger=False, enable_checkpointing=False, callbacks=[ExactResume()])
trainer.fit(BoringModel())
assert trainer.global_step == 3
"""


def test_a_system_without_the_signals_of_unix(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", ON_WINDOWS], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "internal error" not in ended.stderr


# What cannot be exact


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, validated(), 7, more=[Kill(5)])
    saved = torch.load(tmp_path / "step=5.ckpt")
    saved["callbacks"]["ExactResume"]["ranks"] *= 2
    torch.save(saved, tmp_path / "of_two.ckpt")
    with pytest.raises(CheckpointMismatchError, match="was saved by 2 ranks, but this run has 1, which"):
        train(tmp_path, validated(), 7, ckpt=tmp_path / "of_two.ckpt")


def test_a_checkpoint_without_positions_is_resumed_with_a_warning(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=5)
    options: Any = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    Trainer(callbacks=[saving], max_steps=5, **options).fit(validated())
    repeats = "The epoch begins again, and 5 of its batches are seen twice"
    with pytest.warns(UserWarning, match=rf"step=5.ckpt was saved without it, so the .* {repeats}"):
        train(tmp_path, validated(), 7, ckpt=saving.best_model_path)


def test_a_checkpoint_of_an_epochs_end_repeats_no_batch(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    saving = ModelCheckpoint(tmp_path)
    options: Any = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    Trainer(callbacks=[saving], max_epochs=1, **options).fit(validated())
    train(tmp_path, validated(), 7, ckpt=saving.best_model_path)
    (said,) = [str(warning.message) for warning in recwarn if "was saved without it" in str(warning.message)]
    assert said.endswith("so the random numbers differ.")


def test_lightning_alone_reads_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, validated(), 7, more=[Kill(13)])
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=2, accelerator="cpu", logger=False)
    trainer.fit(validated(), ckpt_path=tmp_path / "step=13.ckpt", weights_only=True)
    assert trainer.global_step == 26


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


INEXACT = {
    "Stream is iterable, so resuming reads and drops": lambda: Model(partial(plain, Stream)),
    "come in any order": lambda: Model(partial(plain, num_workers=1, in_order=False)),
    r"Cached\.rng is a separate random generator": lambda: Model(partial(plain, Cached)),
    "Own is not a plain DataLoader and has no state_dict": lambda: Model(lambda: Own(Photos())),
    r"Averaged\.on_train_batch_end runs after ModelCheckpoint": lambda: Averaged(plain),
}


@pytest.mark.parametrize("sentence", INEXACT)
def test_what_cannot_be_exact_is_said_before_the_first_step(tmp_path: Path, sentence: str) -> None:
    with pytest.warns(UserWarning, match=sentence), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, INEXACT[sentence](), 7, more=[Kill(0)])


class Counts(Callback):
    """Changes the module after each batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.hooks += torch.rand(3)


def test_what_a_callback_changes_after_a_batch_is_in_the_file_as_advised(tmp_path: Path) -> None:
    check(tmp_path, lambda: Model(plain), [5], callbacks=lambda: [Counts()])


TUNERS: dict[str, Callable[[], Callback]] = {
    "LearningRateFinder searches again": partial(LearningRateFinder, num_training_steps=12),
    "A checkpoint saved on an exception is": partial(ModelCheckpoint, save_on_exception=True),
}


@pytest.mark.parametrize("sentence", TUNERS)
def test_callbacks_with_which_a_run_is_not_exact_are_named(tmp_path: Path, sentence: str) -> None:
    model = Unscheduled(plain)
    model.lr = 0.02  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=sentence), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, model, 7, more=[TUNERS[sentence](), Kill(0)])


@pytest.mark.follows("Remove that option.")
def test_a_loader_in_the_order_of_its_sampler_is_exact(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, Model(partial(plain, num_workers=1)), 7, more=[Kill(0)])
    assert not [warning for warning in recwarn if "ExactResume" in str(warning.message)]
