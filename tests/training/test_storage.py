"""Storage of a dataset, by its attributes and by the files that real workers have open."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import ConcatDataset, Dataset, Subset
from trainings import Model, burn, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.errors import LowGPUUtilizationWarning
from lightning_gpu_tools.mounts import parse_mounts
from lightning_gpu_tools.trainer.measuring_callback import FitSession
from lightning_gpu_tools.training import compat, storage
from lightning_gpu_tools.training.storage import StorageWatch, named_paths, path_of_data

MOUNTS = parse_mounts(
    """1 0 8:1 / / rw - ext4 /dev/sda rw
2 1 0:5 / /data rw - nfs4 filer:/data rw
3 1 0:6 / /dev/shm rw - tmpfs shm rw
"""
)


@pytest.mark.parametrize(
    ("read", "named", "path"),
    [
        ({}, [], None),
        ({}, ["/data/set", "/data/labels.csv"], "/data/set"),
        ({}, ["/data/set", "/home/me/cache"], None),  # one of them, but which?
        ({"/data/set/a/0.png": 1, "/data/set/b/7.png": 1}, [], "/data/set"),
        ({"/data/set/a/0.png": 1, "/data/set/b/7.png": 1}, ["/home/me/labels", "/data"], "/data"),
        ({"/data/set/a/0.png": 1, "/data/set/b/7.png": 1, "/etc/localtime": 1}, ["/home/me"], "/data/set"),
        ({"/data/set/a/0.png": 1, "/home/me/index.db": 9}, ["/data/set"], "/home/me/index.db"),
    ],
)
def test_files_that_were_read_say_where_the_data_is(read: dict[str, int], named: list[str], path: str | None) -> None:
    assert path_of_data(read, named, MOUNTS) == path


class Folder(Dataset[torch.Tensor]):
    """Like an image folder of torchvision."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    @property
    def folder(self) -> str:
        raise AssertionError("code of the dataset")

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("code of the dataset")

    def __len__(self) -> int:
        return 9


def test_the_paths_of_a_dataset_are_found_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/cats", "b", "train"):
        (tmp_path / name).mkdir(parents=True)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", shape=(3,)).flush()
    (tmp_path / "link").symlink_to("b")
    for dataset, paths in (
        (Folder(log=b, root="a", split="train"), [a, b]),  # the likely one first, and no word that is a file by chance
        (Folder(samples=[(f"{a}/cats/0.png", 0)] * 9, classes=["cats"]), [f"{a}/cats"]),
        (Subset(ConcatDataset([Subset(Folder(root=tmp_path / "link"), [0]), Folder()]), [0]), [b]),
        (Folder(data=np.load(tmp_path / "x.npy", mmap_mode="r")), [str(tmp_path / "x.npy")]),
        (Folder(root="s3://bucket/a", path="/nowhere/at all", text="/" * 10_000, other="\0/"), []),
        ([1, 2, 3], []),
    ):
        assert named_paths(dataset) == paths


class Reading(Dataset[torch.Tensor]):
    """Has a file open while it waits for a gate."""

    def __init__(self, folder: Path) -> None:
        self.names = [folder / str(i) / "0.bin" for i in range(4)]
        self.gate, self.reading = multiprocessing.Event(), multiprocessing.Semaphore(0)
        for name in self.names:
            name.parent.mkdir(parents=True)
            name.write_bytes(b"1234")

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.names[index].open("rb") as file:
            self.reading.release()
            self.gate.wait()
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


def test_a_file_that_a_worker_reads_names_the_storage(tmp_path: Path) -> None:
    dataset = Reading(tmp_path / "data")
    with (tmp_path / "mine.txt").open("w+"), (tmp_path / "mine.txt").open():  # that workers inherit
        iterator = iter(loader(dataset, num_workers=2, prefetch_factor=1))
        for _ in range(2):
            dataset.reading.acquire()
        watch = StorageWatch(lambda: compat.worker_pids(iterator), lambda: None, lambda: str(tmp_path / "new" / "logs"))
        watch.poll()
    dataset.gate.set()
    assert len(list(iterator)) == 4  # which also ends the workers
    assert watch.data.path == str(tmp_path / "data")
    assert watch.checkpoints.path == str(tmp_path / "new" / "logs")
    assert {watch.data.file_system, watch.checkpoints.file_system} == {file_system_of(tmp_path)}


def file_system_of(folder: Path) -> str:
    df = subprocess.run(["df", "--output=fstype", folder], capture_output=True, text=True, check=True)
    return df.stdout.split()[-1]


@pytest.mark.parametrize(
    ("of_data", "of_scratch", "is_named", "free_bytes", "elsewhere"),
    [
        ("nfs4", "xfs", True, 0, "scratch"),
        ("nfs4", "xfs", False, 0, "scratch"),
        ("nfs4", "xfs", False, 2**62, None),  # of unknown size, with too little room
        ("nfs4", "lustre", False, 0, None),
        ("nfs4", "lustre", True, 0, "/dev/shm"),
        ("ext4", "xfs", True, 0, "/dev/shm"),
        ("ext4", "xfs", False, 0, None),  # it may be too large for memory
        ("tmpfs", "xfs", True, 0, None),
    ],
)
def test_a_better_place_has_room_and_is_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_data: str,
    of_scratch: str,
    is_named: bool,
    free_bytes: int,
    elsewhere: str | None,
) -> None:
    mounts = {"/": "overlay", "/dev/shm": "tmpfs", tmp_path / "data": of_data, tmp_path / "scratch": of_scratch}
    lines = [f"1 1 0:{i} / {point} rw - {kind} x rw" for i, (point, kind) in enumerate(mounts.items())]
    monkeypatch.setattr(storage, "read_mounts", lambda: parse_mounts("\n".join(lines)))
    monkeypatch.setattr(storage, "_MIN_FREE_BYTES", free_bytes)
    for name in ("data", "scratch"):
        (tmp_path / name).mkdir()
    file = tmp_path / "data" / "train.h5"
    file.write_bytes(b"1234")
    with file.open() as opened, (tmp_path / "data" / "log").open("w") as log:
        worker = subprocess.Popen(["sh", "-c", "kill -STOP $$"], stdin=opened, stdout=log)
    os.waitid(os.P_PID, worker.pid, os.WSTOPPED)  # by then it has loaded its libraries
    try:
        watch = StorageWatch(lambda: [worker.pid], lambda: Folder(file=file) if is_named else None, lambda: None)
        watch.poll()
    finally:
        worker.kill()
        worker.wait()
    assert (watch.data.path, watch.data.file_system) == (str(file), of_data)
    place = watch.data.elsewhere
    assert (place and place.path) == (elsewhere and str(tmp_path / elsewhere))  # an absolute path stays


class Burning(Folder):
    def __getitem__(self, index: int) -> torch.Tensor:
        burn(0.004)
        return torch.zeros(4)

    def __len__(self) -> int:
        return 90


class UntilPolled(Callback):
    """Waits after the first step until the background thread has polled the storage, or failed to."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.session = FitSession.of(trainer, self)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        recorder = self.session.recorder
        while trainer.global_step == 1 and recorder.measurements().storage is None and not recorder.facts.unread:
            time.sleep(0.001)


def test_the_diagnosis_of_a_training_names_the_file_system_of_its_data(tmp_path: Path) -> None:
    advisor = GPUUtilizationAdvisor(min_seconds=0.01)
    with pytest.warns(LowGPUUtilizationWarning):
        quiet_trainer(tmp_path, callbacks=[advisor, UntilPolled()]).fit(Model(), loader(Burning(root=tmp_path)))
    (evidence,) = [one.evidence for one in advisor.diagnosis.findings if one.cause == "data_loading"]
    assert evidence["storage_path"] == os.path.realpath(tmp_path)
    assert evidence["file_system"] == file_system_of(tmp_path)


def test_storage_that_cannot_be_read_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "read_mounts", lambda: 1 / 0)
    monitor = GPUUtilizationMonitor()
    quiet_trainer(tmp_path, callbacks=[monitor, UntilPolled()]).fit(Model(), loader(Burning(root=tmp_path)))
    report = load_report(tmp_path)
    assert (report.outcome, report.steps) == ("completed", 90)
    assert report.unseen == ("the storage of the dataset (ZeroDivisionError: division by zero)",)
