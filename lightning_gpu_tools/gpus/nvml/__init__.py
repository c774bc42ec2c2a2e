"""The one place that asks the NVIDIA driver, through NVML (``nvidia-ml-py``); ``None`` = it does not say.

NVML sees every GPU of the machine, whatever ``CUDA_VISIBLE_DEVICES`` says, so GPUs are found by UUID. A pick does not
need ``nvml.probe``.
"""

from lightning_gpu_tools.gpus.nvml.driver import (
    identified,
    pids_are_ours,
    read_cpu_affinity,
    read_gpus,
    read_numa_nodes,
    read_nvlinks,
    session,
)

__all__ = [
    "identified",
    "pids_are_ours",
    "read_cpu_affinity",
    "read_gpus",
    "read_numa_nodes",
    "read_nvlinks",
    "session",
]
