"""A machine with NVIDIA GPUs that are not there: torch's own CUDA build runs on it, for tests and for ``dry-run``.

In the place of NVIDIA's runtime, driver and NCCL stand libraries compiled from ``source/``. Memory is the host's,
kernels compute nothing and take time, and NVML reports what the processes of the machine do. docs/simulated_cuda.md
says what is simulated, with which constants, and what is not. It holds only in processes that are started with
``Machine.environment()``, and imports nothing of the package.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_gpu_tools.simulated.build import SimulatedCudaError, libraries
from lightning_gpu_tools.simulated.models import MODELS

__all__ = ["MODELS", "Machine", "SimulatedCudaError", "host_waits"]

VARIABLE = "SIMULATED_CUDA"
# Copies between host and GPU over PCI Express 4.0 x16: 25 GB/s out of pinned memory, 6 GB/s out of pageable memory,
# through which the driver copies once more. A kernel takes at least 5 us. NCCL moves 200 GB/s. All are our defaults.
_SPEEDS = {"kernel_us": 5, "pinned_gb_s": 25, "pageable_gb_s": 6, "nccl_gb_s": 200}
_MAX_GPUS = 16


class Machine:
    """A simulated machine. All of its processes share its folder.

    Args:
        folder: An empty folder, which has to stay while programs run on the machine.
        gpus: Names of ``MODELS``, one for each GPU.
        mig: For each GPU in MIG mode, by its position: the slices of each of its instances, of 7.

    Raises:
        SimulatedCudaError: It cannot be built here.
        ValueError: There is no such GPU, or there are more than 16 GPUs and instances.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        gpus: Sequence[str] = ("h100-80gb",),
        mig: Mapping[int, Sequence[int]] = {},
    ) -> None:
        self.folder = Path(folder).resolve()
        for name in gpus:
            if name not in MODELS:
                raise ValueError(f"There is no GPU {name!r}. Choose one of {', '.join(MODELS)}.")
        self._libraries = libraries()
        self.uuids: list[str] = []
        self._places: list[int] = []
        lines = [f"{key} {value}" for key, value in _SPEEDS.items()]
        for position, name in enumerate(gpus):
            self._places.append(len(self.uuids) + sum(len(mig.get(i, ())) for i in range(position)))
            self.uuids.append(f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'simulated {position}')}")
            lines += ["gpu", *(f"{key} {value}" for key, value in MODELS[name]._asdict().items())]
            lines += [f"uuid {self.uuids[-1]}", f"pci 00000000:{16 * position + 11:02X}:00.0"]
            for number, slices in enumerate(mig.get(position, ())):
                lines += ["mig", *_instance(name, position, number, slices)]
        if len(gpus) + sum(map(len, mig.values())) > _MAX_GPUS:
            raise ValueError(f"A simulated machine has at most {_MAX_GPUS} GPUs and MIG instances.")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "machine.conf").write_text("\n".join(lines) + "\n")

    def environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a process that runs on the machine, out of another one, by default this process's.

        Its Python has to have the same torch as this one.
        """
        inherited = dict(os.environ if environ is None else environ)
        changed = {VARIABLE: str(self.folder), "LD_PRELOAD": "libcuda.so.1"}
        for name in ("LD_LIBRARY_PATH", "PATH"):
            changed[name] = os.pathsep.join(entry for entry in (str(self._libraries), inherited.get(name)) if entry)
        return {**inherited, **changed}

    def occupy(self, gpu: int, size_bytes: int) -> None:
        """Let other programs hold so much of a GPU's memory, by its position, from now on."""
        self._set(gpu, 0, size_bytes)

    def lose(self, gpu: int) -> None:
        """Let a GPU fall off the bus: from now on every call to it fails, in every process, and NVML says so."""
        self._set(gpu, 8, time.monotonic_ns())

    def _set(self, gpu: int, offset: int, value: int) -> None:
        path = self.folder / "machine.state"  # which begins with two numbers for each GPU, see source/machine.h
        with path.open("a+b") as file:
            if file.seek(0, os.SEEK_END) < 16 * _MAX_GPUS:
                file.truncate(16 * _MAX_GPUS)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 16 * _MAX_GPUS) as state:
            struct.pack_into("=Q", state, 16 * self._places[gpu] + offset, value)


def _instance(name: str, position: int, number: int, slices: int) -> list[str]:
    """Return how a MIG instance differs from its GPU: it has so many of 7 slices of the GPU, and of 8 of the memory."""
    model = MODELS[name]
    memory_slices = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}[slices]
    memory_mib = model.memory_mib * memory_slices // 8 - 512
    share = slices / 7
    return [
        f"name {model.name} MIG {slices}g.{round(model.memory_mib * memory_slices / 8 / 1000)}gb",
        f"uuid MIG-{uuid.uuid5(uuid.NAMESPACE_OID, f'simulated {position} {number}')}",
        f"memory_mib {memory_mib}",
        "reserved_mib 0",
        f"slices {slices}",
        f"sms {round(model.sms * share)}",
        *(f"{rate} {getattr(model, rate) * share:g}" for rate in ("fp32_tflops", "tf32_tflops", "half_tflops")),
        f"memory_gb_s {model.memory_gb_s * memory_slices / 8:g}",
    ]


def host_waits() -> dict[str, int]:
    """Return how often this process has waited for the GPU, by what it waited for.

    ``copy`` counts copies that the host cannot go on without: those of pageable memory.

    Raises:
        SimulatedCudaError: This process does not run on a simulated machine.
    """
    try:
        counts = (ctypes.c_long * 4).in_dll(ctypes.CDLL(None), "simulated_cuda_waits")
    except ValueError:
        raise SimulatedCudaError("This process does not run on a simulated machine.") from None
    return dict(zip(("device", "stream", "event", "copy"), counts, strict=True))
