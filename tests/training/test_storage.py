"""Storage of a dataset, by its attributes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_gpu_tools.processes import mount_of, read_mounts
from lightning_gpu_tools.training.dataset import Storage, path_of_data, storage_of


class Folder(Dataset[torch.Tensor]):
    """Like an image folder of torchvision."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    @property
    def folder(self) -> str:
        raise AssertionError("code of the dataset")

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


@pytest.mark.parametrize(("file_system", "is_network"), [("nfs4", True), ("fuse.gcsfuse", True), ("ext4", False)])
def test_network_file_systems_are_known(file_system: str, is_network: bool) -> None:
    assert Storage(path="/", file_system=file_system).is_network is is_network
