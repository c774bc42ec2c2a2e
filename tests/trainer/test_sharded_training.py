"""Trainings whose model is split among the ranks, on the CPU, with all parts of this package: FSDP2, DeepSpeed."""

import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_driver import Driver
from launched_jobs import live_claims, said
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import ModelParallelStrategy
from rank_processes import run_ranks
from torch.distributed.fsdp import fully_shard
from trainings import quiet_trainer

from lightning_gpu_tools import (
    GPUUtilizationAdvisor,
    GPUUtilizationMonitor,
    PortableCheckpointIO,
    load_report,
    load_weights,
)
from lightning_gpu_tools.cli import main

TESTS = Path(__file__).parents[1]
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


class Model(BoringModel):
    def configure_model(self) -> None:
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])  # type: ignore[arg-type, index]


def fit(folder: Path, max_steps: int, *, sharded: bool, ckpt_path: Path | None = None) -> Trainer:
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo", save_distributed_checkpoint=sharded
    )
    trainer = quiet_trainer(
        folder,
        devices=2,
        max_epochs=-1,
        max_steps=max_steps,
        limit_val_batches=0,
        strategy=strategy,
        callbacks=[GPUUtilizationMonitor(), GPUUtilizationAdvisor()],
        plugins=[PortableCheckpointIO()],
        use_distributed_sampler=False,
    )
    trainer.fit(Model(), ckpt_path=ckpt_path)
    return trainer


def train_and_resume(folder: Path, rank: int) -> None:
    first = fit(folder, 2, sharded=True)
    first.save_checkpoint(folder / "sharded")
    torch.save(first.model.state_dict(), folder / f"rank{rank}.pt")
    loaded, trained = BoringModel(), first.model.layer.weight.full_tensor()
    load_weights(loaded, folder / "sharded")
    assert torch.equal(loaded.layer.weight, trained)
    resumed = fit(folder, 5, sharded=False, ckpt_path=folder / "sharded")
    assert resumed.global_step == 5
    resumed.save_checkpoint(folder / "whole.ckpt")
    trained = resumed.model.layer.weight.full_tensor()
    if rank == 0:
        load_weights(loaded, folder / "whole.ckpt")
        assert torch.equal(loaded.layer.weight, trained)


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP2 on a CPU")
def test_fsdp2_trains_saves_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_ranks(tmp_path, train_and_resume)
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    assert main(["checkpoint", "convert", str(tmp_path / "sharded"), str(tmp_path / "one.ckpt")]) == 0
    one = torch.load(tmp_path / "one.ckpt")
    assert (one["global_step"], [*one["state_dict"]]) == (2, ["layer.weight", "layer.bias"])
    assert main(["checkpoint", "inspect", str(tmp_path / "rank1.pt")]) == 0
    assert "layer.weight: 2x32 float32 (DTensor)" in " ".join(capsys.readouterr().out.split())
    report = load_report(tmp_path)
    assert (report.outcome, report.steps) == ("completed", 3)


DEEPSPEED = """
import os
from pathlib import Path
import torch
import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, for minutes
from lightning.pytorch.demos.boring_classes import BoringModel
import cpu_as_cuda
from trainings import quiet_trainer
from lightning_gpu_tools import PortableCheckpointIO, load_weights
cpu_as_cuda.install()
from lightning_gpu_tools.strategies import FreeMemoryDeepSpeedStrategy
# DeepSpeed wants to know the device's number.
FreeMemoryDeepSpeedStrategy.root_device = property(lambda self: torch.device("cpu", 0))
folder = Path(__file__).parent

class Model(BoringModel):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

for stage in (0, 1, 2, 3):
    strategy = FreeMemoryDeepSpeedStrategy(stage=stage, process_group_backend="gloo")
    made = quiet_trainer(folder, accelerator="auto", devices=2, max_steps=2, limit_val_batches=0, strategy=strategy,
                         plugins=[PortableCheckpointIO()])
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


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_every_stage_of_deepspeed_trains_on_the_freest_gpus(
    run_python: RunPython, cuda: Driver, claims_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(DEEPSPEED)
    folders = [TESTS, TESTS.parent, TESTS.parent / "benchmarks", os.environ.get("PYTHONPATH", "")]
    environment = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    answer = run_python(str(tmp_path / "train.py"), env=environment, timeout=170)
    assert answer.returncode == 0, answer.stderr
    assert said(answer.stdout, cuda) == {f"stage{stage}": {0: [3, 2], 1: [3, 2]} for stage in range(4)}
    assert live_claims(claims_dir) == []
