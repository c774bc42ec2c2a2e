"""A machine with simulated NVIDIA GPUs that runs torch's own CUDA build, for tests and for ``dry-run``.

Libraries compiled from ``source/`` replace NVIDIA's runtime, driver, and NCCL. Memory is the host's, kernels take time
but compute nothing, and NVML reports the activity of the machine's processes. docs/simulated_cuda.md lists what is
simulated, with which constants, and what is not. The simulation affects only processes started with
``Machine.environment()``, and this package imports nothing from the rest of lightning_gpu_tools.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_gpu_tools.simulated.build import SimulatedCudaError, libraries
from lightning_gpu_tools.simulated.models import MODELS, find_model

__all__ = ["MODELS", "Machine", "SimulatedCudaError"]

VARIABLE = "SIMULATED_CUDA"
# Copies between host and GPU over PCI Express 4.0 x16: 25 GB/s from pinned memory, 6 GB/s from pageable memory, which
# the driver copies an extra time. A kernel takes at least 5 us. NCCL moves 200 GB/s. All are our defaults.
_KERNEL_US = 5
_SPEEDS = {"pinned_gb_s": 25, "pageable_gb_s": 6, "nccl_gb_s": 200}
_RATES = ("memory_gb_s", "fp32_tflops", "tf32_tflops", "half_tflops")
_MAX_GPUS = 16


class Machine:
    """A simulated machine. All of its processes share its folder.

    Args:
        folder: An empty folder, which must exist as long as programs run on the machine.
        gpus: For each GPU, a name from ``MODELS`` or a part of only one of them, in any case.
        mig: For each GPU in MIG mode, by its position: the slices, out of 7, of each of its instances.
        times_memory: Factor by which each GPU has more memory than its model.
        times_speed: Factor by which kernels and copies take less time.

    Raises:
        SimulatedCudaError: The machine cannot be built here.
        ValueError: A GPU name is unknown or ambiguous, or there are more than 16 GPUs and instances.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        gpus: Sequence[str] = ("h100-80gb",),
        mig: Mapping[int, Sequence[int]] = {},
        times_memory: int = 1,
        times_speed: float = 1,
    ) -> None:
        self.folder = Path(folder).resolve()
        gpus = [find_model(name) for name in gpus]
        self._libraries = libraries()
        self.uuids: list[str] = []
        self._places: list[int] = []
        lines = [f"{key} {value * times_speed:g}" for key, value in _SPEEDS.items()]
        lines.append(f"kernel_us {_KERNEL_US / times_speed:g}")
        for position, name in enumerate(gpus):
            self._places.append(len(self.uuids) + sum(len(mig.get(i, ())) for i in range(position)))
            self.uuids.append(f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'simulated {position}')}")
            model = MODELS[name]
            faster = {rate: getattr(model, rate) * times_speed for rate in _RATES}
            model = model._replace(memory_mib=times_memory * model.memory_mib, **faster)
            lines += ["gpu", *(f"{key} {value}" for key, value in model._asdict().items())]
            lines += [f"uuid {self.uuids[-1]}", f"pci 00000000:{16 * position + 11:02X}:00.0"]
            for number, slices in enumerate(mig.get(position, ())):
                lines += ["mig", *_instance(name, position, number, slices)]
        if len(gpus) + sum(map(len, mig.values())) > _MAX_GPUS:
            raise ValueError(f"A simulated machine has at most {_MAX_GPUS} GPUs and MIG instances.")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "machine.conf").write_text("\n".join(lines) + "\n")

    def environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment for a process on the machine, based on ``environ``, by default this process's.

        The process's Python must have the same torch as this one.
        """
        inherited = dict(os.environ if environ is None else environ)
        changed = {VARIABLE: str(self.folder), "LD_PRELOAD": "libcuda.so.1"}
        for name in ("LD_LIBRARY_PATH", "PATH"):
            changed[name] = os.pathsep.join(entry for entry in (str(self._libraries), inherited.get(name)) if entry)
        return {**inherited, **changed}

    def occupy(self, gpu: int, size_bytes: int) -> None:
        """Make other programs hold ``size_bytes`` of a GPU's memory from now on. ``gpu`` is its position."""
        self._set(gpu, 0, size_bytes)

    def lose(self, gpu: int) -> None:
        """Make a GPU fall off the bus: from now on, all calls to it fail in every process, and NVML reports it."""
        self._set(gpu, 8, time.monotonic_ns())

    def _set(self, gpu: int, offset: int, value: int) -> None:
        path = self.folder / "machine.state"  # begins with two numbers for each GPU, see source/machine.h
        with path.open("a+b") as file:
            if file.seek(0, os.SEEK_END) < 16 * _MAX_GPUS:
                file.truncate(16 * _MAX_GPUS)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 16 * _MAX_GPUS) as state:
            struct.pack_into("=Q", state, 16 * self._places[gpu] + offset, value)


def _instance(name: str, position: int, number: int, slices: int) -> list[str]:
    """Return a MIG instance's differences from its GPU: a share of its 7 GPU slices and 8 memory slices."""
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
