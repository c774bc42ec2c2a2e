"""The CUDA contexts of this process: on the GPU on which it trains, and on others by mistake."""

from __future__ import annotations

import os

import torch

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import limits
from lightning_gpu_tools.runs.run import Run, gpu_readings
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.run_measurements import HeldContext


class Contexts:
    """A reader of this process's contexts. It never creates one."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: set[torch.device] = set()
        self._held_bytes: dict[str | None, int | None] = {}

    def read(self) -> tuple[HeldContext, ...]:
        """Return the contexts; empty if this process sees fewer than two GPUs, or has not started CUDA.

        Their memory is read from the driver when a new one appears on another GPU.
        """
        gpu, place, has_context = self._run.gpu, self._run.place, compat.has_context()
        if gpu is None or has_context is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return ()
        own = torch.device("cuda", torch.cuda.current_device() if gpu.index is None else gpu.index)
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        there = [device for device in devices if has_context(device.index)] if len(devices) > 1 else []
        others = {*there} - {own}
        if not others <= self._seen:
            self._held_bytes = _held_bytes()
        self._seen |= others
        return tuple(
            HeldContext(
                rank=place.rank,
                node=place.node,
                pid=os.getpid(),
                gpu=reading.index,
                uuid=str(reading.uuid),
                is_own=device == own,
                held_bytes=self._held_bytes.get(reading.uuid),
                reserved_bytes=torch.cuda.memory_reserved(device),
            )
            for device, reading in zip(there, gpu_readings(there), strict=True)
        )


def _held_bytes() -> dict[str | None, int | None]:
    """Return this process's memory on each GPU by UUID; empty if the driver does not know its PID."""
    try:
        from lightning_gpu_tools.gpus import nvml  # imports pynvml

        readings = nvml.read_gpus(limit_s=limits.LIMIT_S) if nvml.pids_are_ours() else ()
    except NvmlUnavailableError:
        return {}
    processes = ((gpu.uuid, one) for gpu in readings for one in gpu.processes or ())
    return {uuid: one.memory_used_bytes for uuid, one in processes if one.pid == os.getpid()}
