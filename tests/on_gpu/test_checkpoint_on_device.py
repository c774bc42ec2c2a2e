"""Checkpoints of models on a real GPU, for which the CPU tests have crafted files."""

import resource
from pathlib import Path

import torch
from torch import nn

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.formats import read_structure
from lightning_gpu_tools.checkpoints.reading import read_checkpoint
from lightning_gpu_tools.checkpoints.writing import write_checkpoint


def test_weights_saved_on_a_gpu_load_to_any_device(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    net = torch.compile(nn.DataParallel(nn.Linear(64, 64).cuda(), device_ids=[0]), backend="eager")
    write_checkpoint({"state_dict": net.state_dict()}, path)
    assert read_structure(path).devices == {"cuda:0"}
    assert {one.device.type for one in read_checkpoint(path)["state_dict"].values()} == {"cpu"}
    assert all(one.is_cuda for one in read_checkpoint(path, map_location="cuda:0")["state_dict"].values())
    for device in ("cpu", "cuda:0"):
        target = nn.Linear(64, 64, device=device)
        load_weights(target, path)
        assert target.weight.device == torch.device(device)
        assert torch.equal(target.weight.cpu(), net.module.weight.cpu())


def test_saving_from_a_gpu_streams_tensor_by_tensor(tmp_path: Path) -> None:
    weights = {str(i): torch.ones(8 << 20, device="cuda") for i in range(32)}  # 1 GiB in pieces of 32 MiB
    write_checkpoint({"warm": weights["0"][:4].clone()}, tmp_path / "warm.ckpt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write_checkpoint(weights, tmp_path / "a.ckpt")
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mb < 128
