"""Memory that a training holds on its device, and the steps in which the counters are read."""

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from trainings import HandClock

from lightning_gpu_tools.memory import counters
from lightning_gpu_tools.memory.counters import MemoryCounters
from lightning_gpu_tools.memory.holdings import count_holdings
from lightning_gpu_tools.memory.readings import MemoryReading
from lightning_gpu_tools.training.step_clock import StepClock


def training(module: nn.Module | None, *optimizers: torch.optim.Optimizer, **facts: Any) -> Any:
    known = {"optimizer_steps": 0, "is_plain_ddp": False, "precision": None, **facts}
    device, gpu = torch.device("cpu"), torch.device("cuda", 0)
    return SimpleNamespace(device=device, gpu=gpu, module=module, optimizers=optimizers, **known)


FLOATS = 4  # bytes


def test_shared_weights_count_once() -> None:
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    module[2].weight = module[0].weight
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    held = count_holdings(training(module, optimizer))
    parameters = FLOATS * (64 + 16)
    assert (held.parameters_bytes, held.gradients_bytes) == (parameters, parameters)
    assert held.optimizer_bytes == 2 * parameters + 3 * FLOATS  # each of three tensors counts its steps
    assert held.buffers_bytes == 2 * FLOATS * 8 + 8


@pytest.mark.parametrize("are_views", [False, True])
def test_gradients_that_ddp_copies_count_twice(are_views: bool) -> None:
    module = nn.Linear(8, 8)
    bucket = torch.zeros(72)
    module.weight.grad, module.bias.grad = bucket[:64].view(8, 8), bucket[64:]
    if not are_views:
        module.weight.grad, module.bias.grad = torch.zeros(8, 8), torch.zeros(8)
    held = count_holdings(training(module, is_plain_ddp=True))
    assert (held.gradients_bytes, held.gradient_buckets_bytes) == (72 * FLOATS, 0 if are_views else 72 * FLOATS)


@pytest.fixture
def first_of_four() -> Iterator[None]:
    """This process is rank 0 of four, of which the others are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("first_of_four")
def test_a_sharded_model_counts_what_this_rank_holds() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        for key, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)])))

    module = distribute_module(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), mesh, shard)
    optimizer = torch.optim.Adam(module.parameters(), foreach=False)
    for weight in module.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    held = count_holdings(training(module, optimizer))
    whole = 2 * FLOATS * (64 * 64 + 64)
    assert (held.parameters_bytes, held.gradients_bytes) == (whole / 4, whole / 4)
    assert held.optimizer_bytes == pytest.approx(whole / 2, abs=100)


# When steps are read


class Loop:
    """Steps with the moments of a Trainer's, and counters that take 100 us to read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps_per_optimizer_step: int = 1) -> None:
        self.time, self.clock = HandClock(), StepClock()
        self.reads = 0
        self.fault: Exception | None = None
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(counters, "perf_counter", self.time)
        monkeypatch.setattr(counters, "read_memory", self._read)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (2**32, 2**33))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda gpu: 1.0, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=2**33))
        self.training = training(nn.Linear(4, 4), SimpleNamespace(state={0: {}}))
        self.counters = MemoryCounters(self.training, self.clock)
        self.steps_per_optimizer_step = steps_per_optimizer_step
        self.read: list[int] = []
        self.counters.when_read = lambda: self.read.append(self.clock.steps)

    def _read(self, gpu: torch.device) -> MemoryReading:
        self.time.spend(100e-6)
        self.reads += 1
        if self.fault is not None:
            raise self.fault
        return MemoryReading(allocated_bytes=0, reserved_bytes=0)

    def run(self, steps: int, batch: Any = ()) -> None:
        for _ in range(steps):
            self.clock.steps += 1
            self.counters.begin_step(lambda: (len(batch),))
            self.counters.before_backward()
            self.training.optimizer_steps += self.clock.steps % self.steps_per_optimizer_step == 0
            self.counters.end_step()


def test_reading_takes_at_most_ten_microseconds_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    began_s = loop.time()
    loop.run(5000)
    assert 2e-6 < (loop.time() - began_s) / 5000 < 10e-6
    assert len({step % 10 for step in loop.read}) > 5  # nothing periodic is always or never hit
    assert loop.reads == 1 + 3 * len(loop.read)  # three times in a step that is read, and of no other


def test_each_step_is_read_up_to_the_optimizers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, steps_per_optimizer_step=4)
    loop.run(3)
    facts = loop.counters.facts()
    assert (facts.first_step, facts.holdings) == (None, None)
    loop.run(1)
    facts = loop.counters.facts()
    assert (loop.read, facts.first_step.step) == ([1, 2, 3, 4], 4)
    assert facts.holdings.gradients_bytes == FLOATS * (4 * 4 + 4)  # which are gone by the end of a step


def test_an_allocator_without_counters_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    loop.run(2)
    loop.fault = RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")
    batch = torch.zeros(1)
    kept = weakref.ref(batch)
    loop.run(1000, batch)
    del batch
    assert kept() is None  # an error would keep whatever was in use when it was raised
    reads = loop.reads
    loop.run(1000)
    assert (loop.reads, loop.counters.facts()) == (reads, None)
    assert "getDeviceStats" in str(loop.counters.failure)
