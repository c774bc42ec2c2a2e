"""Specifications of the simulated GPUs.

Memory sizes are as in ``nvidia-smi``. The driver reserves the difference from the total that torch reports in published
device properties and out-of-memory errors of these GPUs (for an A10, those of an A10G); drivers differ by up to
0.2 GiB. Memory bandwidth, matrix rates, and power limits are dense peaks from NVIDIA's data sheets, so a simulated
kernel is never slower than the data sheet allows. Multiprocessors, shared memory, and caches are from the architecture
white papers and CUDA's programming guide.

A CUDA context takes 500 MiB, our default, because it differs between drivers and versions of CUDA: 498 MiB
on an H200 with torch 2.11 and driver 580. That of a T4 was measured by torch-preflight's calibration: 135 MiB with
cuBLAS and cuDNN (torch 2.11, CUDA 12.8).

GPUs older than Turing are missing: torch's builds for CUDA 13 have no code for them.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Model(NamedTuple):
    """One GPU, or one MIG instance of it.

    Attributes:
        name: Product name as the driver reports it.
        memory_mib: Total memory, including the driver's reserved memory.
        reserved_mib: Memory that the driver reserves.
        capability: The compute capability.
        sms: Streaming multiprocessors.
        shared_kib: Shared memory of a multiprocessor.
        l2_mib: Second-level cache.
        memory_gb_s: Peak memory bandwidth, in 1e9 bytes a second.
        fp32_tflops: Peak rate of matrix products in full precision.
        tf32_tflops: Peak rate of matrix products with TF32.
        half_tflops: Peak rate of matrix products in 16 bits.
        idle_w: Power draw when idle: our default.
        limit_w: Power limit, which a fully used GPU is assumed to draw.
        nvlink: Whether NVLink connects all GPUs of the machine.
        context_mib: Memory cost of each process that has started CUDA.
    """

    name: str
    memory_mib: int
    reserved_mib: int
    capability: str
    sms: int
    shared_kib: int
    l2_mib: int
    memory_gb_s: float
    fp32_tflops: float
    tf32_tflops: float
    half_tflops: float
    idle_w: float
    limit_w: float
    nvlink: int = 0
    context_mib: int = 500


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
