"""Makes Lightning believe that the GPUs of the fake driver are CUDA devices, and compute on the CPU instead.

What is replaced is what PyTorch and Lightning ask CUDA; everything above that, the Trainer, the launchers and the
process groups (gloo), is real. Like CUDA it reads ``CUDA_VISIBLE_DEVICES`` once, when it starts. In a test
``install(monkeypatch.setattr)``; in a script that runs as a process of its own ``install()``.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_driver
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.selection.cuda import visible_gpus
from lightning_gpu_tools.trainer.strategies import FreeMemoryStrategy

_state = SimpleNamespace(seen=None)  # the UUIDs that CUDA saw when it started


def install(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace what asks CUDA; CUDA has not started yet."""
    set_attribute(_state, "seen", None)
    set_attribute(torch.cuda, "device_count", lambda: len(uuids()))
    set_attribute(torch.cuda, "is_available", lambda: bool(uuids()))
    set_attribute(torch.cuda, "is_initialized", lambda: _state.seen is not None)
    # Optimizers ask whether a graph is recorded, from torch 2.15 on an accelerator, of which a build for CPUs has none.
    set_attribute(torch.cuda, "is_current_stream_capturing", lambda: False)
    set_attribute(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    set_attribute(torch.cuda, "get_device_properties", _properties)
    for strategy in (DDPStrategy, FSDPStrategy, SingleDeviceStrategy, FreeMemoryStrategy):
        set_attribute(strategy, "root_device", property(lambda self: torch.device("cpu")))
    # PyTorch refuses to shard a model where there is no accelerator: every rank keeps all of it.
    set_attribute(FSDPStrategy, "_setup_model", lambda self, model: model)
    set_attribute(CUDAAccelerator, "setup_device", lambda self, device: start())
    set_attribute(CUDAAccelerator, "setup", lambda self, trainer: None)
    set_attribute(CUDAAccelerator, "teardown", lambda self: None)


def _properties(device: torch.device) -> SimpleNamespace:
    prefix, _, uuid = uuids()[device.index].partition("-")
    return SimpleNamespace(uuid=uuid, name="NVIDIA H200" + " MIG 1g.10gb" * (prefix == "MIG"))


def start() -> None:
    """Start CUDA, as the first tensor on a GPU does."""
    _state.seen = uuids()


def uuids() -> list[str]:
    """Return the UUIDs of the devices that CUDA shows this process."""
    if _state.seen is not None:
        return list(_state.seen)
    # From the fake driver's own file, so that calls of the driver are those of the package alone.
    machine = json.loads(Path(os.environ[fake_driver.VARIABLE]).read_text())
    gpus = [
        GpuReading(
            index=index,
            uuid=one["uuid"],
            mig_instances=tuple(GpuReading(index=index, uuid=part["uuid"]) for part in one["mig"] or () if part),
        )
        for index, one in enumerate(machine["gpus"] if not machine["library_missing"] else [])
    ]
    found = [str(gpu.uuid) for gpu in visible_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))]
    # CUDA shows a process only the first MIG instance, and nothing else.
    return [uuid for uuid in found if uuid.startswith("MIG-")][:1] or found


def device_numbers(trainer: Trainer) -> list[int]:
    """Return the numbers of the CUDA devices that a Trainer was given, on this machine."""
    devices = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy._root_device]
    assert all(device.type == "cuda" for device in devices)
    return [device.index for device in devices]


def gpus_of(trainer: Trainer) -> list[str]:
    """Return the UUIDs of the GPUs that a Trainer uses, in the order of its ranks."""
    return [uuids()[number] for number in device_numbers(trainer)]


def positions(trainer: Trainer, driver: fake_driver.Driver) -> list[int]:
    """Return the same by their positions in the machine."""
    return [[one.uuid for one in driver.gpus].index(uuid) for uuid in gpus_of(trainer)]
