"""A training that is asked to stop, or killed, in its own or in other processes: it saves, ends, and goes on."""

import hashlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from advised import code_in
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, Timer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from rank_processes import run_ranks
from resumed_trainings import Unscheduled, everything, plain, same, train, validated
from trainings import quiet_trainer

from lightning_gpu_tools import ExactResume, PortableCheckpointIO
from lightning_gpu_tools.trainer.preemption import Preemption

# Signals


class Ask(Callback):
    """A scheduler that sends a signal at a certain batch."""

    def __init__(self, step: int, hook: str, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number
        setattr(self, hook, self.ask)

    def ask(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.step:
            os.kill(os.getpid(), self.number)


def stopped(
    folder: Path,
    more: Sequence[Callback],
    plugin: Callable[[], Any] | None = None,
    is_asked: bool = True,
    max_time: str | None = None,
    **options: Any,
) -> Callable[[Any], None]:
    """Train, and train again until it stops; return a function that goes on from a checkpoint and compares the two."""
    model = validated()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = everything(train(folder / "whole", model, 7, **options), model)
    model = validated()
    model.load_state_dict(weights)
    plugins = [plugin()] if plugin else []
    with pytest.raises(SystemExit) if is_asked else nullcontext() as ended:
        train(folder / "killed", model, 7, more=more, plugins=plugins, max_time=max_time, **options)
    if ended is not None:
        assert ended.value.code == 128 + signal.SIGTERM

    def resume(ckpt: Any) -> None:
        model = validated()
        plugins = [plugin()] if plugin else []
        resumed = everything(train(folder / "killed", model, 99, ckpt=ckpt, plugins=plugins, **options), model)
        assert [name for name in expected if not same(expected[name], resumed[name])] == []

    return resume


@pytest.mark.follows("To continue, run the same command with fit(..., ckpt_path={}).")
@pytest.mark.parametrize(
    ("hook", "options"),
    [("on_train_batch_start", {"accumulate_grad_batches": 2, "limit_val_batches": 0}), ("on_validation_batch_end", {})],
    ids=["step", "validation"],
)
def test_a_run_asked_to_stop_saves_and_can_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hook: str, options: Any
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    resume = stopped(tmp_path, [Ask(12, hook)], saves=False, val_check_interval=13, **options)
    assert signal.getsignal(signal.SIGTERM) == before
    assert [path.name for path in (tmp_path / "killed").glob("*.ckpt*")] == ["last.ckpt"]
    resume(code_in(caplog.text, r"ckpt_path='(.*)'\)"))


def test_plugins_that_save_make_no_difference(tmp_path: Path) -> None:
    plugin = lambda: AsyncCheckpointIO(PortableCheckpointIO())  # noqa: E731 - one for each Trainer
    stopped(tmp_path, [Ask(20, "on_train_batch_end")], plugin)("last")


class Swap(Callback):
    """Other weights during validation, as averaging has."""

    def on_validation_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.kept = {name: value.clone() for name, value in pl_module.state_dict().items()}
        for value in pl_module.parameters():
            value.data.zero_()

    def on_validation_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        layers = {name: value for name, value in self.kept.items() if name.startswith("layer")}
        pl_module.load_state_dict({**pl_module.state_dict(), **layers})


def test_weights_that_are_exchanged_for_validation_are_not_saved(tmp_path: Path) -> None:
    model = validated()
    with pytest.raises(SystemExit):
        train(tmp_path, model, 7, more=[Ask(12, "on_validation_batch_end"), Swap()], saves=False)
    saved = torch.load(tmp_path / "last.ckpt")
    assert saved["global_step"] == 14
    assert same(saved["state_dict"]["layer.0.weight"], model.layer[0].weight)
    assert model.layer[0].weight.any()


def test_a_slurm_job_is_saved_and_requeued_after_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"JOB_ID": "3", "JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in {**environment, "JOB_NODELIST": "localhost"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asking = Ask(20, "on_after_backward", signal.SIGUSR1)
    slurm = partial(SLURMEnvironment, auto_requeue=True)
    resume = stopped(tmp_path, [asking], slurm, is_asked=False, saves=False)  # SLURM would end it
    assert (tmp_path / "said").read_text() == "requeue 3\n"
    for path in (None, tmp_path / "killed" / "last.ckpt"):  # without a path, Lightning takes its own file
        resume(path)


def test_a_run_stopped_before_its_first_step_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, validated(), 7, more=[Ask(-1, "on_validation_batch_end")], saves=False)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("*.ckpt*"))


def test_time_is_up(tmp_path: Path) -> None:
    def end_time(trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 5:
            timer = next(callback for callback in trainer.callbacks if isinstance(callback, Timer))
            timer._duration = 0.0

    slow = LambdaCallback(on_train_batch_end=end_time)
    stopped(tmp_path, [slow], is_asked=False, max_time="00:01:00:00")(tmp_path / "killed" / "last.ckpt")


# Processes


class Hit(Callback):
    """A signal to one rank at a step, after which the ranks have seconds to agree."""

    def __init__(self, step: int, rank: int, number: int) -> None:
        self.step, self.rank, self.number = step, rank, number

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if (trainer.global_step, trainer.global_rank) == (self.step, self.rank):
            os.kill(os.getpid(), self.number)
        if trainer.global_step >= self.step:
            time.sleep(0.3)


def train_again(folder: Path, rank: int, *, hit: tuple[int, int, int] | None = None, workers: int = 0) -> None:
    """Go on from the last checkpoint, if there is one, and print a digest of the weights at the end."""
    seed_everything(5 if not list(folder.glob("*.ckpt")) else 99)
    saving = ModelCheckpoint(folder, every_n_train_steps=3, save_last=True)
    callbacks = [ExactResume(), saving, *([Hit(*hit)] if hit else [])]
    place = {"devices": 2, "strategy": "ddp"}
    options = {"plugins": [PortableCheckpointIO()], "enable_checkpointing": True, "max_epochs": 2}
    trainer = quiet_trainer(folder, callbacks=callbacks, **place, **options)
    model = Unscheduled(partial(plain, shuffle=True, num_workers=workers))
    trainer.fit(model, ckpt_path="last")
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print("ENDED", hashlib.sha256(weights).hexdigest(), trainer.global_step)


def last_run(folder: Path, **options: Any) -> tuple[int, list[str], str]:
    """Train, and return the exit code, digest and output of rank 0."""
    (first, *_) = run_ranks(folder, train_again, options=options)
    return first.returncode, re.findall(r"ENDED (\w+ \d+)", first.stdout), first.stdout + first.stderr


def test_ranks_that_end_at_any_step_go_on_to_the_same_weights(tmp_path: Path) -> None:
    """One rank alone gets the signal, and then all are killed; another number of workers makes no difference."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    _, expected, output = last_run(whole)
    assert expected, output
    step = random.randrange(4, 9)
    code, _, output = last_run(killed, hit=(step, 1, signal.SIGTERM), workers=1)
    assert code == 128 + signal.SIGTERM, output
    assert re.search(r"SIGTERM: saved step \d+ to .*last.ckpt in .* s. To continue, run the same command with ", output)
    code, _, output = last_run(killed, hit=(11, 0, signal.SIGKILL))
    assert code == -signal.SIGKILL, output
    _, found, output = last_run(killed)
    assert found == expected, (step, output)


def test_ranks_at_different_points_stop_after_the_highest() -> None:
    store = torch.distributed.HashStore()
    trainers = [SimpleNamespace(world_size=2, global_rank=rank, received_sigterm=False) for rank in range(2)]
    ahead, behind = (Preemption(trainer, store, "run") for trainer in trainers)
    assert [ahead.is_due((5, 0)), behind.is_due((3, 0))] == [False, False]
    trainers[1].received_sigterm = True
    assert ahead._agreed.wait(60)
    assert behind._agreed.wait(60)
    assert [behind.is_due(point) for point in ((4, 0), (5, 0), (5, 1))] == [False, False, True]
    assert ahead.is_due((5, 1))
    ahead.close()
    behind.close()
