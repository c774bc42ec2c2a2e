"""After its first step a training is told what would end it later."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from fake_driver import Driver
from lightning.pytorch.callbacks import ModelCheckpoint
from limited_memory import LimitedMemory
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, select_gpus
from lightning_gpu_tools.advice.failures import shortcomings
from lightning_gpu_tools.runs.surroundings import read_surroundings
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
    assert f"(PID {other.pid}) has claimed all of the memory of GPU 0" in told
