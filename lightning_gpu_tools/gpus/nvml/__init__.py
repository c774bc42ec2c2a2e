"""All access to the NVIDIA driver, through NVML (``nvidia-ml-py``); ``None`` = not reported.

NVML sees every GPU of the machine, regardless of ``CUDA_VISIBLE_DEVICES``, so GPUs are identified by UUID. Picking GPUs
does not need ``nvml.probe``.
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
