"""The attribute of a dataset that fills the memory."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from rank_processes import start_ranks
from synthetic import STEP, cpu_run
from torch.utils.data import ConcatDataset, Dataset, Subset
from trainings import Model, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor
from lightning_gpu_tools.advice.verdict import early_warnings
from lightning_gpu_tools.memory import history
from lightning_gpu_tools.memory.readings import MemoryGrowth
from lightning_gpu_tools.processes import mount_of, read_mounts
from lightning_gpu_tools.training import dataset as of_datasets
from lightning_gpu_tools.training.dataset import DatasetGrowth, GrownAttribute, path_of_data, storage_of

MIB = 2**20
KEPT = 300_000


class Photos(Dataset[torch.Tensor]):
    """A dataset that keeps what it has loaded."""

    def __init__(self) -> None:
        self.names = [f"photo {i}" for i in range(1000)]  # does not grow
        self.cache: dict[int, np.ndarray[Any, Any]] = {}

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        self.cache[index] = np.ones(KEPT, np.uint8)
        return torch.ones(4)


class UntilGrown(Callback):
    """Ends training once it is known that the dataset has grown, and leaves what the report would say then."""

    def __init__(self, monitor: GPUUtilizationMonitor, whose: str) -> None:
        self.monitor, self.whose = monitor, whose

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step % 20 == 0:
            recorder = self.monitor._session.recorder  # type: ignore[union-attr]
            assert recorder is not None
            growth = [one for one in recorder.history.growth() if one.whose == self.whose]
            measured = recorder.measurements()
            if growth and measured.dataset_growth:
                (found,) = early_warnings(replace(measured, growth=growth))
                (Path(trainer.default_root_dir) / "found").write_text(json.dumps([found.evidence, found.advice]))
                trainer.should_stop = "attribute" in found.evidence


def train(folder: Path, rank: int, workers: int) -> None:
    history._WORKERS_EVERY, history._INTERVAL_S, history._MIN_POINTS_PER_PART = 1, 0.05, 1
    of_datasets._EVERY_S = 0.2
    monitor = GPUUtilizationMonitor()
    until = UntilGrown(monitor, "workers" if workers else "process")
    trainer = quiet_trainer(folder, callbacks=[monitor, until], max_steps=10_000)
    trainer.fit(Model(), loader(Photos(), num_workers=workers))


RUNS = {"process": {"workers": 0}, "workers": {"workers": 2}}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Evidence and advice on the growth in each run; all run at the same time."""
    folders = {name: tmp_path_factory.mktemp(name) for name in RUNS}
    started = [one for name in RUNS for one in start_ranks(folders[name], train, ranks=1, options=RUNS[name])]
    for process, folder in zip(started, folders.values(), strict=True):
        process.join(150)
        assert process.exitcode == 0, (folder / "stderr0").read_text()
    return {name: json.loads((folder / "found").read_text()) for name, folder in folders.items()}


@pytest.mark.follows("Limit the size of {}, or keep nothing in it.")
@pytest.mark.parametrize(("run", "where"), [("process", r"\."), ("workers", r" in worker [01]\.")])
def test_the_attribute_that_grows_is_named(run: str, where: str, found: dict[str, Any]) -> None:
    evidence, advice = found[run]
    assert evidence["attribute"] == "Photos.cache"
    assert evidence["attribute_bytes"] >= MIB
    assert re.search(rf"Photos\.cache grew from [\d.]+ (B|KiB|MiB) to [\d.]+ MiB \([\d,]+ entries\){where}", advice)
    assert "Limit the size of Photos.cache" in advice


def test_what_grows_elsewhere_is_not_blamed_on_the_dataset() -> None:
    growth = MemoryGrowth(whose="workers", bytes_per_s=1.0, grown_bytes=100 * MIB)
    cache = GrownAttribute("Photos.cache", 0, 40 * MIB, 9, worker=0)
    (found,) = early_warnings(cpu_run(STEP, growth=[growth], dataset_growth=[cache]))
    assert "attribute" not in found.evidence
    assert "A worker copies each Python object" in found.advice


class Holder(Dataset[int]):
    def __init__(self, **containers: Any) -> None:
        vars(self).update(containers)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("container", "fill", "grown"),
    [
        ([], lambda one: one.extend(np.zeros(MIB) for _ in range(4)), 32 * MIB),
        ({}, lambda one: one.update({i: (b"x" * MIB, i) for i in range(8)}), 8 * MIB),
    ],
    ids=["arrays", "bytes in a dict"],
)
def test_the_growth_of_each_kind_is_estimated(container: Any, fill: Any, grown: int) -> None:
    dataset = Holder(names=["a"] * 1000, container=container)
    sizes = DatasetGrowth(lambda: ConcatDataset([Subset(dataset, range(3)), Holder(more=[1])]))
    sizes.poll()
    assert sizes.grown == []
    fill(container)
    sizes.poll()
    (one,) = sizes.grown
    assert (one.name, one.entries, one.worker) == ("Holder.container", len(container), None)
    assert 0.9 * grown <= one.now_bytes - one.before_bytes <= 1.5 * grown


def test_the_file_system_of_the_data_is_that_of_its_mount(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    real = os.path.realpath(tmp_path)
    mount = mount_of(real, read_mounts())
    assert mount is not None
    data = Subset(Holder(log="x", root=tmp_path / "link"), [0])
    assert storage_of(path_of_data(data)) == f"{real} is on {mount.file_system}"
    assert storage_of(path_of_data(Holder(root="s3://bucket/a"))) == storage_of(path_of_data([1, 2])) == ""
