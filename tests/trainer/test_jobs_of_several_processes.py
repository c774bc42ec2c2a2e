"""Real jobs of several processes: one choice of GPUs with each launcher, and models that are split among the ranks."""

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import Driver
from launched_jobs import MEET, PLACE, free_port, live_claims, said
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import ModelParallelStrategy
from rank_processes import run_ranks
from sample_report import TRAINED
from slurm_cluster import WHY_NOT as WHY_NO_SLURM
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
from lightning_gpu_tools.reports.report import ReportFile

TESTS = Path(__file__).parents[1]
AGREED = {0: [3, 2], 1: [3, 2]}
RunJob = Callable[..., "subprocess.CompletedProcess[str]"]

FIT = """
import os, sys
import lightning.pytorch, lightning_gpu_tools
from lightning.pytorch.strategies import StrategyRegistry
assert "ddp_free_memory" in StrategyRegistry
import cpu_as_cuda
cpu_as_cuda.install()
import torch.distributed
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_gpu_tools import FreeMemoryCUDAAccelerator
from lightning_gpu_tools.strategies import FreeMemoryDDPStrategy, FreeMemoryFSDPStrategy

def fit(name, **options):
    trainer = Trainer(devices=2, max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False, limit_val_batches=0, **options)
    trainer.fit(BoringModel())
    assert trainer.state.finished
    line = ["SAID", name, trainer.global_rank, *cpu_as_cuda.gpus_of(trainer)]
    os.write(1, (" ".join(map(str, line)) + "\\n").encode())  # the ranks share the pipe

def end():  # gloo's threads, left alone, now and then abort the interpreter's end
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


@pytest.fixture
def run_job(cuda: Driver, claims_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunJob:
    """``run_job(code, "torchrun", name={rank: [position, ...]})``: a job made one choice, and left no claim."""
    folders = [str(TESTS), str(TESTS.parent), str(TESTS.parent / "benchmarks"), os.environ["PYTHONPATH"]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))

    def run(code: str, *launcher: str, env: dict[str, str] | None = None, **expected: dict[int, list[int]]) -> Any:
        (tmp_path / "train.py").write_text(code)
        command = [*(launcher or [sys.executable]), str(tmp_path / "train.py")]
        # Where Lightning has imported mpi4py, MPI has put variables of its own beside those that os.environ knows.
        environment = {**os.environ, **(env or {})}
        answer = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
        )
        assert answer.returncode == 0, answer.stderr
        assert said(answer.stdout, cuda) == expected
        assert answer.stderr.count("Picked GPU") == 1
        assert live_claims(claims_dir) == []
        return answer

    return run


@pytest.mark.timeout(300)  # five processes import torch and Lightning
def test_ranks_of_spawn_and_ddp_agree(run_job: RunJob, tmp_path: Path) -> None:
    code = """
if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        fit("spawned", accelerator=FreeMemoryCUDAAccelerator(), strategy="ddp_spawn")
    fit("started", accelerator=FreeMemoryCUDAAccelerator(min_free="last"), strategy=FreeMemoryDDPStrategy())
    end()
"""
    small = replace(TRAINED.memory[0], parts_bytes={"parameters": 20 * 2**30, "context": 2**30})
    ReportFile(tmp_path / "gpu_report").save(replace(TRAINED, memory=(small,)))
    answer = run_job(FIT + code, spawned={0: [3, 2]}, started=AGREED)  # other spawned ranks run no script
    assert answer.stderr.count("min_free=last: 25.2 GiB (peak 21.0 GiB of LitModel") == 1


def test_ranks_that_torchrun_restarts_choose_again_and_train_with_fsdp(run_job: RunJob) -> None:
    # The first start fails before Lightning is imported, which saves seconds.
    fails = f"{PLACE}\nplace_and_say(exclusive=True)\n{MEET}\nsys.exit(os.environ['RANK'] == '1')"
    named = "assert os.environ['TORCHELASTIC_ERROR_FILE'].endswith('/error.json')"
    start = (
        f"import os\n{named}\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n{textwrap.indent(fails, '    ')}\n"
    )
    fsdp = "fit('trained', strategy=FreeMemoryFSDPStrategy(exclusive=True))\nend()\n"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    options = ["--max-restarts=1", "--monitor-interval=0.1"]
    run_job(f"{start}{FIT}{fsdp}", *torchrun, *options, placed=AGREED, trained=AGREED)


@pytest.mark.skipif(bool(WHY_NO_SLURM), reason=WHY_NO_SLURM)
def test_tasks_of_slurm_agree(slurm: dict[str, str], run_job: RunJob) -> None:
    # Names of nodes mean nothing outside of this SLURM, so Lightning is told where rank 0 is.
    env = {**slurm, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    code = f"{FIT}fit('trained', strategy='ddp_free_memory')\nend()\n"
    srun = ["srun", "-N1", "--ntasks-per-node=2", "--job-name=train", sys.executable]
    run_job(code, *srun, env=env, trained=AGREED)


@pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="Open MPI and mpi4py are not installed (apt-get install openmpi-bin, pip install mpi4py)",
)
def test_processes_of_mpirun_agree(run_job: RunJob) -> None:
    code = f"{FIT}fit('trained', accelerator=FreeMemoryCUDAAccelerator(), strategy='ddp')\nend()\n"
    run_job(code, "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, trained=AGREED)


# Models that are split


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
def test_every_stage_of_deepspeed_trains_on_the_freest_gpus(run_job: RunJob, tmp_path: Path) -> None:
    env = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    run_job(DEEPSPEED, env=env, **{f"stage{stage}": AGREED for stage in range(4)})
