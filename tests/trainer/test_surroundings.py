"""After its first step a training is told what would end it later."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from fake_driver import Driver, gpu
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from limited_memory import LimitedMemory
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, select_gpus
from lightning_gpu_tools.advice.shortcomings import shortcomings
from lightning_gpu_tools.runs.surroundings import read_surroundings
from lightning_gpu_tools.selection.claims import read_ledger
from lightning_gpu_tools.trainer.facts import LoopRun


def test_a_folder_that_takes_no_checkpoint_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    saving = ModelCheckpoint(tmp_path / "file" / "checkpoints", every_n_epochs=2)
    trainer = quiet_trainer(
        tmp_path, callbacks=[GPUUtilizationMonitor(), saving], enable_checkpointing=True, max_epochs=1
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(Model(), loader(Samples(10)))
    texts = [str(one.message) for one in warned]
    assert sum(text.startswith("Checkpoints cannot be written to ") for text in texts) == 1


class RemoveClaim(Callback):
    """Removes the job's claim, as the owner of the folder could, and waits until it is there again."""

    def __init__(self, claims_dir: Path) -> None:
        self.claims_dir = claims_dir

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            for file in self.claims_dir.iterdir():
                file.unlink()
            deadline = time.monotonic() + 60
            while not list(self.claims_dir.glob("claim-*.json")):
                assert time.monotonic() < deadline
                time.sleep(0.02)


def test_the_monitor_takes_a_removed_claim_again(driver: Driver, claims_dir: Path, tmp_path: Path) -> None:
    driver.gpus = [gpu()]
    with select_gpus(exclusive=True):
        callbacks = [GPUUtilizationMonitor(), RemoveClaim(claims_dir)]
        with pytest.warns(UserWarning, match="this job has claimed it again"):
            quiet_trainer(tmp_path, callbacks=callbacks).fit(Model(), loader(Samples(6)))
        with read_ledger(str(claims_dir)) as ledger:
            assert [claim.kind for claim in ledger.claims()] == ["exclusive"]
    assert list(claims_dir.iterdir()) == []


def test_many_claims_of_one_user_are_one_line(
    driver: Driver, claims_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = """
import sys
from lightning_gpu_tools import select_gpus
held = [select_gpus(min_free="1MiB") for _ in range(3)]
print(flush=True)
sys.stdin.read()
"""
    with LimitedMemory().gpu(driver, monkeypatch.setattr):
        run = LoopRun()
        run.gpus = [run.device]
        with subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=-1, text=True) as other:
            assert other.stdout is not None
            other.stdout.readline()
            (told,) = shortcomings(read_surroundings(run, None))
            other.kill()
    assert "(3 claims) has claimed 3.00 MiB of the memory of GPU 0" in told


def test_a_claim_of_another_job_on_the_same_gpu_is_told(
    driver: Driver, claims_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LimitedMemory().gpu(driver, monkeypatch.setattr):
        select_gpus(1, min_free="1MiB")
        run = LoopRun()
        run.gpus = [run.device]
        assert read_surroundings(run, None).claims == ()  # its own
        command = [sys.executable, "-m", "lightning_gpu_tools", "run", "-n", "1", "--", "sh", "-c", "echo; sleep 100"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            (told,) = shortcomings(read_surroundings(run, None))
            other.kill()
    assert f"(pid {other.pid}) has claimed all of the memory of GPU 0" in told
