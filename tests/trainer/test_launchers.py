"""One real training per launcher: all processes of a job get the same GPUs, pick once, and leave no claim."""

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
from fake_driver import Driver, gpu
from launched_jobs import MEET, PLACE, free_port, live_claims, said
from sample_report import TRAINED
from slurm_cluster import WHY_NOT as WHY_NO_SLURM

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


@pytest.fixture(autouse=True)
def machine(driver: Driver, claims_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four idle GPUs; the higher the number, the more free memory."""
    driver.gpus = [gpu(memory_free=f"{10 * i + 10}GiB") for i in range(4)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ["PYTHONPATH"]]))


@pytest.fixture
def run_job(driver: Driver, claims_dir: Path, tmp_path: Path) -> RunJob:
    """``run_job(code, "torchrun", name={rank: [position, ...]})``: a job made one choice, and left no claim."""

    def run(code: str, *launcher: str, env: dict[str, str] | None = None, **expected: dict[int, list[int]]) -> Any:
        (tmp_path / "train.py").write_text(code)
        command = [*(launcher or [sys.executable]), str(tmp_path / "train.py")]
        # Where Lightning has imported mpi4py, MPI has put variables of its own beside those that os.environ knows.
        environment = {**os.environ, **(env or {})}
        answer = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
        )
        assert answer.returncode == 0, answer.stderr
        assert said(answer.stdout, driver) == expected
        assert answer.stderr.count("Picked GPU") == 1
        assert live_claims(claims_dir) == []
        return answer

    return run


@pytest.mark.timeout(300)  # five processes import torch and Lightning
def test_ranks_of_spawn_and_ddp_agree(driver: Driver, run_job: RunJob, tmp_path: Path) -> None:
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


def test_ranks_that_torchrun_restarts_choose_again_and_train_with_fsdp(driver: Driver, run_job: RunJob) -> None:
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
