"""The largest batch by a record of one step of a real training, and the traces of that record."""

import contextlib
import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader
from trainings import Boom, Samples, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor
from lightning_gpu_tools.advice.batch_size import CachingAllocator
from lightning_gpu_tools.memory.blocks import segments
from lightning_gpu_tools.memory.readings import RankMemory
from lightning_gpu_tools.trainer.fit_session import FitSession

WIDTH, DEPTH = 1024, 6


class Deep(LightningModule):
    """Layers whose outputs are kept for backward: 24 MiB of weights, and 1 MiB for each 128 samples of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch.repeat(1, WIDTH // 4)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


def is_recording() -> bool:
    return bool(torch._C._cuda_isHistoryEnabled())


def train(folder: Path, batch_size: int, **options: Any) -> tuple[RankMemory, int | None]:
    """Train 4 steps, and return the record and the largest batch."""
    trainer = quiet_trainer(folder, accelerator="gpu", callbacks=[GPUUtilizationMonitor()], **options)
    session = FitSession.of(trainer, Callback())
    trainer.fit(Deep(), DataLoader(Samples(4 * batch_size), batch_size=batch_size))
    recorder = session.recorder
    recorder.find_largest_batch()
    return recorder.memory.facts(), recorder.largest_batch_size


@pytest.mark.usefixtures("two_gib")
@pytest.mark.follows("batch_size={} (now {}; up to {} fit, based on measured memory)")
@pytest.mark.parametrize("options", [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}])
def test_the_largest_batch_trains_and_hardly_more(tmp_path: Path, options: dict[str, Any]) -> None:
    small, larger = (train(tmp_path, size, **options)[1] for size in (64, 256))
    assert small == pytest.approx(larger, rel=0.05)  # copies of weights, and blocks, do not grow with the batch
    train(tmp_path, larger, **options)
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path, int(1.1 * larger), **options)
    assert not is_recording()


def test_a_step_that_fails_leaves_no_record_running(tmp_path: Path) -> None:
    class Fails(Deep):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            assert is_recording()
            raise Boom

    trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=[GPUUtilizationMonitor()])
    with pytest.raises(Boom):
        trainer.fit(Fails(), DataLoader(Samples(8)))
    assert not is_recording()


def test_a_record_of_the_programs_is_its_own(tmp_path: Path) -> None:
    record: Any = torch.cuda.memory._record_memory_history
    record(max_entries=10_000)
    try:
        memory, largest = train(tmp_path, 8)
        assert (memory.recorded, largest) == ((), None)
        assert is_recording()
        assert torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        record(enabled=None)


@pytest.mark.parametrize("seed", range(2))
def test_the_model_of_the_allocator_takes_what_torch_takes(seed: int) -> None:
    """Segments of other tests may be there, too."""
    chance, room = random.Random(seed), (2**40, 900 * 2**20)[seed % 2]
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    room += torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))
    model, live = CachingAllocator(room, segments(torch.device("cuda", 0))), dict[int, torch.Tensor]()
    try:
        for number in range(1500):
            if live and chance.random() < (0.5 if len(live) > 60 else 0.35):
                gone = chance.choice(list(live))
                del live[gone]
                model.free(gone)
            else:
                size = int(2 ** chance.uniform(4, 26))
                with contextlib.suppress(torch.OutOfMemoryError):
                    live[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
                assert model.allocate(number, size) == (number in live)
            assert model.reserved_bytes == torch.cuda.memory_reserved()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
