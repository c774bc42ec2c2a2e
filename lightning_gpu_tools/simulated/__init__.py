"""A machine with simulated NVIDIA GPUs that runs torch's own CUDA build, for tests and for ``dry-run``.

Libraries compiled from ``source/`` replace NVIDIA's runtime, driver, and NCCL. Memory is the host's, kernels take time
but compute nothing, and NVML reports the activity of the machine's processes. docs/simulated_cuda.md lists what is
simulated, with which constants, and what is not. The simulation affects only processes started with
``Machine.environment()``, and this package imports nothing from the rest of lightning_gpu_tools.
"""

import os
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_gpu_tools.simulated.build import SimulatedCudaError, libraries

__all__ = ["MODELS", "Machine", "SimulatedCudaError"]

VARIABLE = "SIMULATED_CUDA"
# A kernel takes at least 5 us. Copies over PCI Express 4.0 x16 take 25 GB/s from pinned memory and 6 GB/s from pageable
# memory, which the driver copies an extra time. NCCL moves 200 GB/s. All are our defaults.
_KERNEL_NS = 5000
_COPY_GB_S = (25, 6, 200)
_RATES = ("memory_gb_s", "fp32_tflops", "tf32_tflops", "half_tflops")
_MAX_GPUS = 16


class Model(NamedTuple):
    """One GPU. The rates are dense peaks from NVIDIA's data sheets, so no kernel is slower than they allow."""

    name: str  # as the driver reports it
    memory_mib: int  # as in nvidia-smi, with the reserved memory
    reserved_mib: int  # by the driver: the difference from torch's total, as published; drivers differ by up to 0.2 GiB
    capability: str
    sms: int  # this and the next two: architecture white papers, CUDA programming guide
    shared_kib: int  # of a multiprocessor
    l2_mib: int
    memory_gb_s: float  # in 1e9 bytes
    fp32_tflops: float
    tf32_tflops: float
    half_tflops: float
    idle_w: float  # our default
    limit_w: float  # the power draw of a fully used GPU
    nvlink: int = 0  # whether NVLink connects all GPUs of the machine
    # Of each process that has started CUDA. Our default: on an H200, it is 498 MiB with torch 2.11 and driver 580.
    # torch-preflight's calibration measured 135 MiB on a T4 (torch 2.11, CUDA 12.8).
    context_mib: int = 500


# Without GPUs older than Turing, for which torch's builds for CUDA 13 have no code. The reserved memory of the A10 is
# that of the A10G.
MODELS = {
    "b200": Model("NVIDIA B200", 183359, 728, "10.0", 148, 228, 126, 7700, 75, 1100, 2250, 140, 1000, nvlink=1),
    "h200": Model("NVIDIA H200", 143771, 615, "9.0", 132, 228, 50, 4800, 67, 494, 989, 75, 700, nvlink=1),
    "h100-80gb": Model("NVIDIA H100 80GB HBM3", 81559, 469, "9.0", 132, 228, 50, 3350, 67, 494, 989, 70, 700, nvlink=1),
    "a100-80gb": Model(
        "NVIDIA A100-SXM4-80GB", 81920, 768, "8.0", 108, 164, 40, 2039, 19.5, 156, 312, 60, 400, nvlink=1
    ),
    "a100-40gb": Model(
        "NVIDIA A100-SXM4-40GB", 40960, 600, "8.0", 108, 164, 40, 1555, 19.5, 156, 312, 50, 400, nvlink=1
    ),
    "a40": Model("NVIDIA A40", 46068, 652, "8.6", 84, 100, 6, 696, 37.4, 74.8, 149.7, 30, 300),
    "a30": Model("NVIDIA A30", 24576, 481, "8.0", 56, 164, 24, 933, 10.3, 82, 165, 30, 165),
    "a10g": Model("NVIDIA A10G", 23028, 441, "8.6", 80, 100, 6, 600, 35, 35, 70, 20, 300),
    "a10": Model("NVIDIA A10", 23028, 441, "8.6", 72, 100, 6, 600, 31.2, 62.5, 125, 20, 150),
    "l40s": Model("NVIDIA L40S", 46068, 479, "8.9", 142, 100, 96, 864, 91.6, 183, 362, 35, 350),
    "l4": Model("NVIDIA L4", 23034, 546, "8.9", 58, 100, 48, 300, 30.3, 60, 121, 16, 72),
    "rtx-5090": Model("NVIDIA GeForce RTX 5090", 32607, 484, "12.0", 170, 100, 96, 1792, 104.8, 104.8, 209.5, 20, 575),
    "rtx-4090": Model("NVIDIA GeForce RTX 4090", 24564, 480, "8.9", 128, 100, 72, 1008, 82.6, 82.6, 165.2, 20, 450),
    "rtx-3090": Model("NVIDIA GeForce RTX 3090", 24576, 317, "8.6", 82, 100, 6, 936, 35.6, 35.6, 71, 20, 350),
    "rtx-a6000": Model("NVIDIA RTX A6000", 49140, 464, "8.6", 84, 100, 6, 768, 38.7, 77.4, 154.8, 20, 300),
    "t4": Model("Tesla T4", 15360, 451, "7.5", 40, 64, 4, 320, 8.1, 8.1, 65, 10, 70, context_mib=135),
}


def find_model(name: str) -> str:
    """Return the name in ``MODELS`` of which this is a part, in any case: ``h100``, ``RTX 4090``, ``A100-SXM4-80GB``.

    Raises:
        ValueError: It is part of no name or of several.
    """
    asked = _letters(name)
    names = {candidate: (_letters(candidate), _letters(model.name)) for candidate, model in MODELS.items()}
    found = [candidate for candidate in MODELS if asked in names[candidate]] or [
        candidate for candidate in MODELS if asked and any(asked in full for full in names[candidate])
    ]
    if len(found) != 1:
        problem = f"There is no GPU {name!r}." if not found else f"{name!r} is a part of {len(found)} names."
        raise ValueError(f"{problem} Choose one of {', '.join(found or MODELS)}.")
    return found[0]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


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
        self._places: list[int] = []
        lines = [f"{_KERNEL_NS / times_speed:g} {' '.join(f'{speed * times_speed:g}' for speed in _COPY_GB_S)}"]
        for position, name in enumerate(gpus):
            place = len(lines) - 1
            self._places.append(place)
            model = MODELS[name]
            faster = {rate: getattr(model, rate) * times_speed for rate in _RATES}
            model = model._replace(memory_mib=times_memory * model.memory_mib, **faster)
            pci = f"00000000:{16 * position + 11:02X}:00.0"
            whole = f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'simulated {position}')}"
            lines.append(_line(model, -1, whole, pci))
            for number, slices in enumerate(mig.get(position, ())):
                part = f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, f'simulated {position} {number}')}"
                lines.append(_line(_instance(model, slices), place, part, pci))
        if len(gpus) + sum(map(len, mig.values())) > _MAX_GPUS:
            raise ValueError(f"A simulated machine has at most {_MAX_GPUS} GPUs and MIG instances.")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "machine.conf").write_text("\n".join(lines) + "\n")

    def environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment for a process on the machine, based on ``environ``, by default this process's.

        The process's Python must have the same torch as this one.
        """
        inherited = os.environ if environ is None else environ
        paths = os.pathsep.join(filter(None, [str(self._libraries), inherited.get("LD_LIBRARY_PATH")]))
        own = {VARIABLE: str(self.folder), "LD_PRELOAD": "libcuda.so.1", "LD_LIBRARY_PATH": paths}
        return {**inherited, **own}

    def occupy(self, gpu: int, size_bytes: int) -> None:
        """Make other programs hold ``size_bytes`` of a GPU's memory from now on. ``gpu`` is its position."""
        path = self.folder / "machine.state"  # begins with these sizes, see source/machine.h
        path.touch()
        with path.open("r+b") as state:
            state.seek(8 * self._places[gpu])
            state.write(size_bytes.to_bytes(8, sys.byteorder))


def _line(model: Model, parent: int, name: str, pci: str) -> str:
    """Return a line of machine.conf for read_gpu() in source/machine.c.

    ``name`` is the UUID. ``parent`` is the number of the line of a MIG instance's GPU, and -1 for a GPU.
    """
    sizes = (size * 2**20 for size in (model.memory_mib, model.reserved_mib, model.context_mib))
    rates = (model.memory_gb_s, *(1000 * rate for rate in (model.fp32_tflops, model.tf32_tflops, model.half_tflops)))
    chip = (model.capability, model.sms, model.shared_kib, model.l2_mib, model.nvlink)
    fields = (parent, *sizes, *chip, *rates, model.idle_w, model.limit_w, name, pci, model.name)
    return " ".join(map(str, fields))


def _instance(model: Model, slices: int) -> Model:
    """Return a MIG instance: a share of its GPU's 7 GPU slices and 8 memory slices."""
    memory_slices = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}[slices]
    share = slices / 7
    return model._replace(
        name=f"{model.name} MIG {slices}g.{round(model.memory_mib * memory_slices / 8 / 1000)}gb",
        memory_mib=model.memory_mib * memory_slices // 8 - 512,
        reserved_mib=0,
        sms=round(model.sms * share),
        fp32_tflops=model.fp32_tflops * share,
        tf32_tflops=model.tf32_tflops * share,
        half_tflops=model.half_tflops * share,
        memory_gb_s=model.memory_gb_s * memory_slices / 8,
    )
