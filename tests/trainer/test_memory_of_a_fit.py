"""The account of GPU memory in real trainings over a simulated allocator and the fake driver."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import cpu_as_cuda
import pytest
import torch
from fake_driver import Driver, gpu, process
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from rank_processes import run_ranks
from simulated_memory import SimulatedMemory
from torch.utils.data import DataLoader, Dataset
from trainings import Boom, Raise, logged, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, watch
from lightning_gpu_tools.advice.memory_account import MemoryAccount
from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.gpus.nvml import driver as nvml_driver
from lightning_gpu_tools.reports.report import load_report
from lightning_gpu_tools.trainer.facts import LoopRun
from lightning_gpu_tools.trainer.measuring_callback import FitSession
from lightning_gpu_tools.training import memory_counters
from lightning_gpu_tools.training.memory_readings import RankMemory

MIB, GIB = 2**20, 2**30
WIDTH, BATCH = 256, 512
PARAMETERS = 4 * (2 * (WIDTH * WIDTH + WIDTH) + WIDTH + 1)
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


class ByHand(Network):
    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()  # type: ignore[union-attr]


class Batches(Dataset[torch.Tensor]):
    """Keeps nothing, because what it keeps would count as on the GPU."""

    def __init__(self, steps: int, batch_size: int) -> None:
        self.steps, self.batch_size = steps, batch_size

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(self.batch_size, WIDTH)


def batches(steps: int, batch_size: int = BATCH) -> DataLoader[torch.Tensor]:
    return DataLoader(Batches(steps, batch_size), batch_size=None)


class Facts(Callback):
    """Keeps what was counted."""

    memory: RankMemory

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.session = FitSession.of(trainer, self)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counters = self.session.timer.memory
        assert counters is not None
        facts = counters.facts()
        assert facts is not None
        self.memory = facts

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.session.release(self)


@pytest.fixture
def memory(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> SimulatedMemory:
    """The allocator of a GPU, whose counters are read in every step."""
    driver.gpus = [gpu(memory_total=8 * GIB, memory_free=8 * GIB - 100 * MIB, memory_reserved=100 * MIB)]
    cpu_as_cuda.install(monkeypatch.setattr)
    cpu_as_cuda.start()
    memory = SimulatedMemory()
    memory.install(monkeypatch.setattr)
    monkeypatch.setattr(memory_counters, "_BUDGET_S", 1e9)
    return memory


class OnTheDriver(Callback):
    """Has the driver say at a step what the processes use, and waits until it has been sampled."""

    def __init__(self, driver: Driver, memory: SimulatedMemory, others_bytes: int) -> None:
        self.driver, self.memory, self.others_bytes = driver, memory, others_bytes
        self.own_bytes = 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step != 3:
            return
        self.own_bytes = self.memory.reserved_bytes + 300 * MIB
        with self.driver.change():
            (card,) = self.driver.gpus
            card.processes = [process(os.getpid(), self.own_bytes), process(os.getppid(), self.others_bytes)]
            card.memory_free = 8 * GIB - self.own_bytes - self.others_bytes - 100 * MIB
        listed = self.lists()
        deadline_s = time.monotonic() + 60
        while self.lists() < listed + 2:  # the one that may be under way does not count
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    def lists(self) -> int:
        return sum(call.function == "nvmlDeviceGetComputeRunningProcesses_v3" for call in self.driver.calls())


# In a container, where processes have other numbers, ours is known if no other one is as large.
@pytest.mark.parametrize(("same_namespace", "others_bytes"), [(True, GIB), (False, MIB)])
def test_a_report_accounts_for_the_memory_of_the_gpu(
    driver: Driver,
    memory: SimulatedMemory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    same_namespace: bool,
    others_bytes: int,
) -> None:
    for module in (nvml, nvml_driver):
        monkeypatch.setattr(module, "pids_are_ours", lambda: same_namespace)
    logger, said = CSVLogger(tmp_path), OnTheDriver(driver, memory, others_bytes)
    with memory:
        trainer = quiet_trainer(
            tmp_path, accelerator="cuda", logger=logger, callbacks=[GPUUtilizationMonitor(interval_s=0.01), said]
        )
        trainer.fit(Network(), batches(8))
    report = load_report(logger.log_dir)
    (account,) = report.memory
    parts = account.parts_bytes
    assert account.used_bytes == said.own_bytes + others_bytes + 100 * MIB == sum(parts.values())
    assert account.free_bytes == 8 * GIB - account.used_bytes
    assert account.explained_share is not None
    assert account.explained_share >= 0.98
    assert (parts["parameters"], parts["gradients"]) == (PARAMETERS, PARAMETERS)
    assert parts["optimizer_states"] == 2 * PARAMETERS + 6 * 4
    assert parts["buffers"] == MIB
    assert parts["activations"] == pytest.approx(3 * HIDDEN, rel=0.05)  # two layers' and a gradient
    assert parts["other_tensors"] == pytest.approx(HIDDEN, rel=0.05)  # the batch
    assert {name: parts[name] for name in ("context", "driver", "other_processes")} == {
        "context": 300 * MIB,
        "driver": 100 * MIB,
        "other_processes": others_bytes,
    }
    (other,) = account.others
    assert (other.pid, other.user is not None) == (os.getppid(), same_namespace)
    assert [point.kept_bytes for point in account.timeline]
    assert report.unseen == ()
    printed = capsys.readouterr().out
    assert "in use on GPU 0 are (100 % explained)" in printed
    assert (f"(PID {os.getppid()})" in printed) == same_namespace  # a MiB is not worth a line
    assert logged(Path(logger.log_dir)).keys() >= {f"gpu_tools/memory_{name}_bytes" for name in parts}


def fit(memory: SimulatedMemory, folder: Path, model: type[LightningModule], **options: Any) -> RankMemory:
    facts = Facts()
    callbacks = [GPUUtilizationMonitor(report=False), facts]
    with memory:
        quiet_trainer(folder, accelerator="cuda", callbacks=callbacks, **options).fit(model(), batches(8), batches(1))
    return facts.memory


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_moments_of_a_step_tell_its_parts(memory: SimulatedMemory, tmp_path: Path, accumulate: int) -> None:
    facts = fit(memory, tmp_path, Network, accumulate_grad_batches=accumulate)
    first, last = facts.first_step, facts.last_step
    assert first is not None
    assert last is not None
    assert (first.step, last.step, last.batch_shape) == (accumulate, 8, (BATCH, WIDTH))
    s, f, z, b, e = (one.allocated_bytes for one in last.readings)
    # Every second batch has the gradients of the one before, which are not zeroed.
    assert f - z == pytest.approx(PARAMETERS if accumulate == 1 else 0, abs=8 * 512)
    assert f - s == pytest.approx(2 * HIDDEN, rel=0.05)
    assert b == pytest.approx(s, rel=0.02)
    assert e == pytest.approx(b, abs=4096)
    _, _, _, b, e = (one.allocated_bytes for one in first.readings)
    assert e - b == pytest.approx(2 * PARAMETERS, rel=0.02)
    assert facts.holdings is not None
    assert facts.holdings.gradients_kept_bytes == facts.holdings.gradients_bytes == PARAMETERS


def test_optimization_by_hand_has_no_moment_after_forward(memory: SimulatedMemory, tmp_path: Path) -> None:
    last = fit(memory, tmp_path, ByHand).last_step
    assert last is not None
    assert last.after_forward is None
    assert last.begin is not None
    assert last.before_backward is not None
    forward = last.before_backward.allocated_bytes - last.begin.allocated_bytes
    assert forward == pytest.approx(2 * HIDDEN - PARAMETERS, rel=0.05)


def test_the_phase_with_the_peak_is_known(memory: SimulatedMemory, tmp_path: Path) -> None:
    peaks = fit(memory, tmp_path, Network).peaks_bytes
    assert max(peaks, key=peaks.__getitem__) in ("forward", "backward", "optimizer")
    facts = Facts()
    with memory:
        options: dict[str, Any] = {"accelerator": "cuda", "num_sanity_val_steps": 0}  # which is before training
        trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor(report=False), facts], **options)
        trainer.fit(Network(), batches(4), batches(1, 16 * BATCH))
    peaks = facts.memory.peaks_bytes
    assert max(peaks, key=peaks.__getitem__) == "validation"


@pytest.mark.parametrize("zero_at_the_end", [True, False])
def test_a_loop_has_an_account_too(
    memory: SimulatedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_at_the_end: bool
) -> None:
    devices = [torch.device("cuda", 0)], torch.device("cpu")
    monkeypatch.setattr(LoopRun, "_find_devices", lambda self: devices)
    with memory, watch(folder=str(tmp_path)) as run:
        network = Network()
        optimizer = network.configure_optimizers()
        for batch in run.batches(batches(8)):
            if not zero_at_the_end:
                optimizer.zero_grad()
            network.training_step(batch, 0).backward()
            optimizer.step()
            if zero_at_the_end:
                optimizer.zero_grad()
    (account,) = load_report(tmp_path).memory
    parts = account.parts_bytes
    assert parts["parameters"] == PARAMETERS
    assert parts["gradients"] == PARAMETERS
    assert parts["optimizer_states"] == 2 * PARAMETERS + 6 * 4
    assert parts["other_tensors"] >= MIB  # nothing leads from a loop to its buffers
    kept = account.moments_bytes["step_start"] - sum(parts[name] for name in ("parameters", "optimizer_states"))
    assert kept == pytest.approx(MIB + HIDDEN + (0 if zero_at_the_end else PARAMETERS), rel=0.4)


def test_a_failing_allocator_costs_the_account_alone(
    memory: SimulatedMemory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Break(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            memory.fault = RuntimeError("no counters")

    with memory:
        trainer = quiet_trainer(tmp_path, accelerator="cuda", callbacks=[GPUUtilizationMonitor(), Break()])
        trainer.fit(Network(), batches(8))
    report = load_report(tmp_path)
    assert (report.steps, report.outcome, report.memory) == (8, "completed", ())
    assert capsys.readouterr().out.count("RuntimeError('no counters')") == 1


def test_a_run_that_stopped_has_its_account(memory: SimulatedMemory, tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, accelerator="cuda", callbacks=[GPUUtilizationMonitor(), Raise(at_step=4)])
    with memory, pytest.raises(Boom):
        trainer.fit(Network(), batches(8))
    (account,) = load_report(tmp_path).memory
    assert account.parts_bytes["optimizer_states"] == 2 * PARAMETERS + 6 * 4


def train_two(folder: Path, rank: int) -> None:
    cpu_as_cuda.install()
    memory = SimulatedMemory()

    def put(owner: Any, name: str, value: Any, **_: Any) -> None:
        setattr(owner, name, value)

    memory.install(put)
    with memory:
        trainer = quiet_trainer(
            folder,
            accelerator="cuda",
            devices=2,
            strategy=DDPStrategy(process_group_backend="gloo"),
            callbacks=[GPUUtilizationMonitor()],
        )
        trainer.fit(Network(), batches(16))


def test_rank_zero_accounts_for_the_gpus_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    machine = Driver(tmp_path / "machine")
    machine.gpus = [gpu(), gpu()]
    results = run_ranks(tmp_path, train_two, machines=[machine, machine])
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    accounts: list[MemoryAccount] = list(load_report(tmp_path).memory)
    assert [(one.index, one.uuid) for one in accounts] == [(i, card.uuid) for i, card in enumerate(machine.gpus)]
    for account in accounts:
        assert account.parts_bytes["parameters"] == PARAMETERS
        assert account.parts_bytes["gradient_buckets"] == PARAMETERS
    raw = json.loads((tmp_path / "gpu_report" / "gpu_report.json").read_text())["memory"]
    assert [bool(one["timeline"]) for one in raw] == [True, False]
