"""Makes Lightning believe that the GPUs of the fake driver are CUDA devices, and compute on the CPU instead.

For scripts that run as real processes of their own (DDP children, torchrun ranks): ``import cpu_as_cuda`` first. What
is replaced is what PyTorch and Lightning ask CUDA; everything above that, the Trainer, the launchers and the process
groups (gloo), is real. Like CUDA it reads ``CUDA_VISIBLE_DEVICES`` once, when it starts.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_gpu_tools import nvml
from lightning_gpu_tools.visibility import visible_gpus

_seen: list[str] | None = None  # the UUIDs that CUDA saw when it started


def _visible() -> list[str]:
    """The UUIDs of the devices; MIG: CUDA shows a process only the first instance."""
    if _seen is not None:
        return _seen
    gpus = visible_gpus(nvml.read_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"), "PCI_BUS_ID", list)
    uuids = [str(gpu.uuid) for gpu in gpus]
    return [uuid for uuid in uuids if uuid.startswith("MIG-")][:1] or uuids


def start() -> None:
    """Start CUDA, as the first tensor on a GPU does."""
    global _seen
    _seen = _visible()


def uuid_of(device: torch.device) -> str:
    """The GPU behind a device."""
    return _visible()[device.index]


def devices_of(trainer: object) -> list[torch.device]:
    """The CUDA devices that a Trainer was given, although it computes on the CPU."""
    strategy = trainer.strategy  # type: ignore[attr-defined]
    return getattr(strategy, "parallel_devices", None) or [strategy._root_device]


torch.cuda.device_count = lambda: len(_visible())
torch.cuda.is_available = lambda: bool(_visible())
torch.cuda.is_initialized = lambda: _seen is not None
torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=_visible()[index].removeprefix("GPU-"))
for _strategy in (DDPStrategy, SingleDeviceStrategy):
    _strategy.root_device = property(lambda self: torch.device("cpu"))  # type: ignore[assignment]
CUDAAccelerator.setup_device = lambda self, device: start()  # type: ignore[method-assign]
CUDAAccelerator.setup = lambda self, trainer: None  # type: ignore[method-assign]
CUDAAccelerator.teardown = lambda self: None  # type: ignore[method-assign]
