"""Specifications of the simulated GPUs.

Memory sizes are as in ``nvidia-smi``. Memory bandwidth, matrix rates, and power limits are dense peaks from NVIDIA's
data sheets. A simulated kernel is thus never slower than the data sheet allows. Multiprocessors, shared memory, and
caches are from the architecture white papers and CUDA's programming guide. Two values are our defaults, because they
differ between drivers: the 500 MiB of a context, and the memory that the driver reserves.
"""

from __future__ import annotations

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
    "h200": Model("NVIDIA H200", 143771, 600, "9.0", 132, 228, 50, 4800, 67, 494, 989, 75, 700, nvlink=1),
    "h100-80gb": Model("NVIDIA H100 80GB HBM3", 81559, 551, "9.0", 132, 228, 50, 3350, 67, 494, 989, 70, 700, nvlink=1),
    "a100-80gb": Model(
        "NVIDIA A100-SXM4-80GB", 81920, 600, "8.0", 108, 164, 40, 2039, 19.5, 156, 312, 60, 400, nvlink=1
    ),
    "a100-40gb": Model(
        "NVIDIA A100-SXM4-40GB", 40960, 600, "8.0", 108, 164, 40, 1555, 19.5, 156, 312, 50, 400, nvlink=1
    ),
    "l40s": Model("NVIDIA L40S", 46068, 500, "8.9", 142, 100, 96, 864, 91.6, 183, 362, 35, 350),
    "l4": Model("NVIDIA L4", 23034, 450, "8.9", 58, 100, 48, 300, 30.3, 60, 121, 16, 72),
    "rtx-4090": Model("NVIDIA GeForce RTX 4090", 24564, 350, "8.9", 128, 100, 72, 1008, 82.6, 82.6, 165.2, 20, 450),
    "rtx-3090": Model("NVIDIA GeForce RTX 3090", 24576, 300, "8.6", 82, 100, 6, 936, 35.6, 35.6, 71, 20, 350),
    "t4": Model("Tesla T4", 15360, 260, "7.5", 40, 64, 4, 320, 8.1, 8.1, 65, 10, 70, context_mib=135),
}
