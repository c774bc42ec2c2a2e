"""What the crafted files of the CPU tests stand for, on a real GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_gpu_tools import PortableCheckpointIO, load_from_checkpoint, load_weights
from lightning_gpu_tools.checkpoints.reading import read_checkpoint
from lightning_gpu_tools.checkpoints.sources import read_structure
from lightning_gpu_tools.checkpoints.writing import write_checkpoint

pytestmark = pytest.mark.gpu


def trainer(folder: Path, accelerator: str, epochs: int = 1) -> Trainer:
    return Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=epochs,
        limit_train_batches=4,
        limit_val_batches=1,
        default_root_dir=folder,
        plugins=[PortableCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )


def test_weights_saved_on_a_gpu_come_to_the_cpu_or_where_they_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    net = nn.DataParallel(nn.Linear(64, 64).cuda(), device_ids=[0])
    write_checkpoint({"state_dict": net.state_dict()}, path)
    locations = read_structure(path).devices
    assert locations == {"cuda:0"}
    assert read_checkpoint(path)["state_dict"]["module.weight"].device.type == "cpu"
    assert read_checkpoint(path, map_location="cuda:0")["state_dict"]["module.weight"].is_cuda
    for device in ("cpu", "cuda:0"):
        target = nn.Linear(64, 64, device=device)
        load_weights(target, path)
        assert target.weight.device == torch.device(device)
        assert torch.equal(target.weight.cpu(), net.module.weight.cpu())


def test_saving_from_a_gpu_streams_tensor_by_tensor(tmp_path: Path) -> None:
    import resource

    weights = {str(i): torch.ones(8 << 20, device="cuda") for i in range(32)}  # 1 GiB in pieces of 32 MiB
    write_checkpoint({"warm": weights["0"][:4].clone()}, tmp_path / "warm.ckpt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write_checkpoint(weights, tmp_path / "a.ckpt")
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mb < 128


def test_a_training_on_a_gpu_resumes_there_and_on_the_cpu(tmp_path: Path) -> None:
    first = BoringModel()
    run = trainer(tmp_path, "cuda")
    run.fit(first)
    path = tmp_path / "a.ckpt"
    run.save_checkpoint(path)
    for accelerator in ("cuda", "cpu"):
        again = BoringModel()
        trainer(tmp_path, accelerator, epochs=2).fit(again, ckpt_path=path)
    loaded = load_from_checkpoint(BoringModel, path)
    assert loaded.device.type == "cpu"
    assert torch.equal(loaded.layer.weight, first.layer.weight.cpu())


def test_a_compiled_model_on_a_gpu_loads_into_a_plain_one(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).cuda()
    compiled = torch.compile(net, backend="eager")
    write_checkpoint(compiled.state_dict(), tmp_path / "a.pt")
    target = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    load_weights(target, tmp_path / "a.pt")
    assert torch.equal(target[0].weight, net[0].weight.cpu())
