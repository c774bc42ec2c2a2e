"""The account of GPU memory in real trainings, by torch's own allocator and the driver."""

import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from rank_processes import run_ranks
from torch.utils.data import DataLoader
from trainings import logged, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor
from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.memory import counters
from lightning_gpu_tools.memory.holdings import workspace_sizes
from lightning_gpu_tools.reports.report import load_report
from lightning_gpu_tools.reports.text import render_text

MIB, GIB = 2**20, 2**30
WIDTH, BATCH = 2048, 4000
PARAMETERS = 4 * (2 * (WIDTH * WIDTH + WIDTH) + WIDTH + 1)
STATES = 2 * PARAMETERS  # what counts steps is on the host
HIDDEN = 4 * BATCH * WIDTH  # what a layer's output takes


class Network(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
        self.register_buffer("table", torch.zeros(MIB // 4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layers(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def batches(steps: int, batch_size: int = BATCH) -> DataLoader[torch.Tensor]:
    """Return the same batch for each step."""
    return DataLoader([torch.zeros(batch_size, WIDTH)] * steps, batch_size=None)


@pytest.fixture(autouse=True)
def _every_step_is_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(counters, "_BUDGET_S", 1e9)
    gc.collect()  # an earlier Trainer, whose model would count as before training
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def other_process() -> Iterator[int]:
    """Start another process on the same GPU, which holds little of it."""
    code = "import sys, torch; held = torch.zeros(1, device='cuda'); print('ready', flush=True); sys.stdin.read()"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        assert other.stdout.readline() == "ready\n"
        yield other.pid


# In a container processes have other numbers, and ours is found if no other one is as large.
@pytest.mark.parametrize("same_namespace", [True, False])
def test_a_report_accounts_for_the_memory_of_the_gpu(
    other_process: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    same_namespace: bool,
) -> None:
    if same_namespace and not nvml.pids_are_ours():
        pytest.skip("the driver numbers processes by another namespace")
    monkeypatch.setattr(nvml, "pids_are_ours", lambda: same_namespace)
    held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    logger = CSVLogger(tmp_path)
    callbacks = [GPUUtilizationMonitor(interval_s=0.05)]
    trainer = quiet_trainer(tmp_path, accelerator="gpu", logger=logger, callbacks=callbacks)
    trainer.fit(Network(), batches(60))
    report = load_report(logger.log_dir)
    (account,) = report.memory
    parts = account.parts_bytes
    assert sum(parts.values()) == account.used_bytes
    assert account.explained_share >= 0.98
    assert (parts["parameters"], parts["gradients"]) == (PARAMETERS, PARAMETERS)
    assert parts["optimizer_states"] == STATES
    assert parts["buffers"] == MIB
    assert parts["activations"] >= 2 * HIDDEN
    assert parts["earlier_tensors"] >= held.nbytes
    size = max(workspace_sizes(None))
    assert parts["workspaces"] == 2 * size  # of the handles in forward and in backward
    assert parts["other_tensors"] >= HIDDEN  # the batch
    assert 100 * MIB < parts["context"] < 2 * GIB
    assert 100 * MIB < parts["other_processes"] < 2 * GIB
    (other,) = account.others
    assert (other.pid, other.user is not None) == (other_process, same_namespace)
    assert report.unseen == ()
    printed = render_text(report, full=True)
    assert re.search(r"^Memory of GPU 0: .* used, .* free \(100% explained\)", printed, re.MULTILINE)
    assert f"(PID {other_process})" in printed
    assert logged(Path(logger.log_dir)).keys() >= {f"gpu_tools/memory_{name}_bytes" for name in parts}


def train_two(folder: Path, rank: int) -> None:
    callbacks = [GPUUtilizationMonitor()]
    quiet_trainer(folder, accelerator="gpu", devices=2, strategy="ddp", callbacks=callbacks).fit(Network(), batches(16))


@pytest.mark.usefixtures("two_gpus")
def test_rank_zero_accounts_for_the_gpus_of_all_ranks(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, train_two)
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    accounts = load_report(tmp_path).memory
    uuids = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(2)]
    assert [(one.index, one.uuid) for one in accounts] == [*enumerate(uuids)]
    for account in accounts:
        assert account.parts_bytes["parameters"] == PARAMETERS
        assert account.parts_bytes["gradient_buckets"] == PARAMETERS
