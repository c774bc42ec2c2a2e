"""Trainings whose model is split among the ranks, on the CPU, with all parts of this package: FSDP2, DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_driver import Driver, gpu
from launched_jobs import live_claims, said

from lightning_gpu_tools.cli import main

TESTS = Path(__file__).parents[1]
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

HEAD = """
import os, sys
from pathlib import Path
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor
from lightning_gpu_tools import PortableCheckpointIO, load_weights

folder = Path(__file__).parent

def trainer(max_steps, strategy, **options):
    return Trainer(
        devices=2, max_steps=max_steps, strategy=strategy, limit_val_batches=0, default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )
"""

FSDP2 = (
    HEAD
    + """
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

class Model(BoringModel):
    def configure_model(self):
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

def fit(max_steps, sharded, ckpt_path=None, model=None):
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo", save_distributed_checkpoint=sharded
    )
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor()]
    made = trainer(max_steps, strategy, accelerator="cpu", callbacks=callbacks, plugins=[PortableCheckpointIO()],
                   use_distributed_sampler=False)
    made.fit(model or Model(), ckpt_path=ckpt_path)
    return made

first = fit(2, sharded=True)
first.save_checkpoint(folder / "sharded")
torch.save(first.model.state_dict(), folder / f"rank{first.global_rank}.pt")
loaded, trained = BoringModel(), first.model.layer.weight.full_tensor()
load_weights(loaded, folder / "sharded")
assert torch.equal(loaded.layer.weight, trained)
resumed = fit(5, sharded=False, ckpt_path=folder / "sharded")
assert resumed.global_step == 5
resumed.save_checkpoint(folder / "whole.ckpt")
trained = resumed.model.layer.weight.full_tensor()
if resumed.is_global_zero:
    loaded = BoringModel()
    load_weights(loaded, folder / "whole.ckpt")
    assert torch.equal(loaded.layer.weight, trained)
torch.distributed.destroy_process_group()
"""
)

DEEPSPEED = (
    HEAD
    + """
import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, for minutes
import cpu_as_cuda
cpu_as_cuda.install()
from lightning_gpu_tools.strategies import FreeMemoryDeepSpeedStrategy
# DeepSpeed wants to know the device's number.
FreeMemoryDeepSpeedStrategy.root_device = property(lambda self: torch.device("cpu", 0))

class Model(BoringModel):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

for stage in (0, 1, 2, 3):
    strategy = FreeMemoryDeepSpeedStrategy(stage=stage, process_group_backend="gloo")
    made = trainer(2, strategy, plugins=[PortableCheckpointIO()])
    model = Model()
    made.fit(model)
    os.write(1, f"SAID stage{stage} {made.global_rank} {' '.join(cpu_as_cuda.gpus_of(made))}\\n".encode())
    made.save_checkpoint(folder / f"stage{stage}")
    torch.distributed.barrier()
    loaded = BoringModel()
    load_weights(loaded, folder / f"stage{stage}")
    with deepspeed.zero.GatheredParameters([model.layer.weight], enabled=stage == 3):
        assert torch.equal(loaded.layer.weight, model.layer.weight.cpu()), stage
torch.distributed.destroy_process_group()
"""
)


@pytest.fixture
def train(tmp_path: Path, run_python: RunPython) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(code)
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        answer = run_python(str(tmp_path / "train.py"), env={"PYTHONPATH": path, **environment}, timeout=170)
        assert answer.returncode == 0, answer.stderr
        return answer

    return run


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP2 on a CPU")
def test_fsdp2_trains_saves_and_resumes(
    train: Callable[..., object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(FSDP2)
    assert main(["checkpoint", "convert", str(tmp_path / "sharded"), str(tmp_path / "one.ckpt")]) == 0
    one = torch.load(tmp_path / "one.ckpt")
    assert (one["global_step"], [*one["state_dict"]]) == (2, ["layer.weight", "layer.bias"])
    assert main(["checkpoint", "inspect", str(tmp_path / "rank1.pt")]) == 0
    assert "layer.weight 2x32 float32 (DTensor)" in " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / "gpu_report" / "gpu_report.json").read_text())
    assert (report["outcome"], report["steps"]) == ("completed", 3)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_every_stage_of_deepspeed_trains_on_the_freest_gpus(
    train: Callable[..., subprocess.CompletedProcess[str]], driver: Driver, claims_dir: Path, tmp_path: Path
) -> None:
    driver.gpus = [gpu(memory_free=f"{gib}GiB") for gib in (10, 20, 30, 40)]
    answer = train(DEEPSPEED, DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    assert said(answer.stdout, driver) == {f"stage{stage}": {0: [3, 2], 1: [3, 2]} for stage in range(4)}
    assert live_claims(claims_dir) == []
