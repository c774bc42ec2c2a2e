"""Warnings after the first step about shortages that would end training later."""

import re
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_driver import Driver, gpu
from harness import quiet_options
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, select_gpus
from lightning_gpu_tools.runs import surroundings
from lightning_gpu_tools.selection.claims import read_ledger


def told(folder: Path, **options: Any) -> list[str]:
    """Train an epoch, and return what is told of checkpoints, of which there is one every other epoch."""
    saving = ModelCheckpoint(**{"every_n_epochs": 2, **options})
    trainer = quiet_trainer(folder, callbacks=[GPUUtilizationMonitor(report=False), saving], enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(Model(), loader(Samples(10)))
    texts = (str(one.message) for one in warned)
    return [text for text in texts if text.startswith(("Checkpoints cannot be written to ", "The disk of "))]


@pytest.mark.follows("Choose another folder: ModelCheckpoint(dirpath=...), or Trainer(default_root_dir=...).")
def test_an_unwritable_checkpoint_folder_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (message,) = told(tmp_path, dirpath=tmp_path / "file" / "checkpoints")
    assert f"{tmp_path / 'file' / 'checkpoints'}: Not a directory. " in message
    option, trainers_option = re.findall(r"\((\w+)=\.\.\.\)", message)
    assert told(tmp_path, **{option: tmp_path / "other", "every_n_epochs": 1}) == []
    assert list((tmp_path / "other").iterdir())
    assert trainers_option in quiet_options(tmp_path)
    assert len(told(tmp_path / "file")) == 1
    assert told(tmp_path) == []


@pytest.mark.parametrize(("free", "says"), [(40, []), (39, [" has 39 B left, but two checkpoints need 40 B."])])
def test_a_full_disk_is_named_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, says: list[str]
) -> None:
    monkeypatch.setattr(surroundings.shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    found = told(tmp_path)  # a model of five weights
    assert [words in message for message, words in zip(found, says, strict=True)] == [True] * len(says)


def test_the_monitor_takes_a_removed_claim_again(driver: Driver, claims_dir: Path, tmp_path: Path) -> None:
    def remove(trainer: Trainer, *args: Any) -> None:
        """Remove the job's claim, as the owner of the folder could, and wait until it is there again."""
        if trainer.global_step == 3:
            for file in claims_dir.iterdir():
                file.unlink()
            deadline = time.monotonic() + 60
            while not list(claims_dir.glob("claim-*.json")):
                assert time.monotonic() < deadline
                time.sleep(0.02)

    driver.gpus = [gpu()]
    with select_gpus(exclusive=True):
        callbacks = [GPUUtilizationMonitor(), LambdaCallback(on_train_batch_end=remove)]
        with pytest.warns(UserWarning, match="this job has claimed it again"):
            quiet_trainer(tmp_path, callbacks=callbacks).fit(Model(), loader(Samples(6)))
        with read_ledger(str(claims_dir)) as ledger:
            assert [claim.kind for claim in ledger.claims()] == ["exclusive"]
    assert list(claims_dir.iterdir()) == []
