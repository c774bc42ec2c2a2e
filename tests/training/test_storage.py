"""Storage of a dataset, by its attributes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import ConcatDataset, Dataset, Subset
from trainings import Model, burn, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor
from lightning_gpu_tools.errors import LowGPUUtilizationWarning
from lightning_gpu_tools.mounts import mount_of, read_mounts
from lightning_gpu_tools.trainer.measuring_callback import FitSession
from lightning_gpu_tools.training.storage import Storage, path_of_data, storage_of


class Folder(Dataset[torch.Tensor]):
    """Like an image folder of torchvision."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    @property
    def folder(self) -> str:
        raise AssertionError("code of the dataset")

    def __getitem__(self, index: int) -> torch.Tensor:
        burn(0.004)
        return torch.zeros(4)

    def __len__(self) -> int:
        return 90


def test_the_path_of_a_dataset_is_found_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", shape=(3,)).flush()
    a = str(tmp_path / "a")
    for dataset, path in (
        (Folder(log=str(tmp_path), root=a), a),
        (Folder(samples=[(f"{a}/0.png", 0)] * 9, classes=["cats"]), a),
        (Subset(ConcatDataset([Subset(Folder(root=tmp_path / "a"), [0]), Folder()]), [0]), a),
        (Folder(data=np.load(tmp_path / "x.npy", mmap_mode="r")), str(tmp_path / "x.npy")),
        (Folder(root="s3://bucket/a", path="/nowhere/at all", folder=3, data_path="\0/"), None),
        ([1, 2, 3], None),
    ):
        assert path_of_data(dataset) == path


def test_the_file_system_of_a_folder_is_that_of_its_mount(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    real = os.path.realpath(tmp_path)
    mount = mount_of(real, read_mounts())
    assert mount is not None
    assert storage_of(str(tmp_path / "link")) == Storage(path=real, file_system=mount.file_system)
    assert storage_of(str(tmp_path / "new")) == Storage(path=f"{real}/new", file_system=mount.file_system)
    assert storage_of("s3://bucket/a") is storage_of(None) is None


@pytest.mark.parametrize(
    ("file_system", "is_network"), [("nfs4", True), ("fuse.gcsfuse", True), ("ext4", False), ("overlay", False)]
)
def test_network_file_systems_are_known(file_system: str, is_network: bool) -> None:
    assert Storage(path="/", file_system=file_system).is_network is is_network


class UntilRead(Callback):
    """Waits after the first step until the background thread has read the storage."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.session = FitSession.of(trainer, self)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        while trainer.global_step == 1 and self.session.recorder.measurements().storage is None:
            time.sleep(0.001)


def test_the_diagnosis_names_the_file_system_of_the_data(tmp_path: Path) -> None:
    advisor = GPUUtilizationAdvisor(min_seconds=0.01)
    with pytest.warns(LowGPUUtilizationWarning):
        quiet_trainer(tmp_path, callbacks=[advisor, UntilRead()]).fit(Model(), loader(Folder(root=tmp_path)))
    (evidence,) = [found.evidence for found in advisor.diagnosis.findings if found.cause == "data_loading"]
    assert evidence["storage_path"] == os.path.realpath(tmp_path)
    assert evidence["file_system"] == mount_of(os.path.realpath(tmp_path), read_mounts()).file_system
