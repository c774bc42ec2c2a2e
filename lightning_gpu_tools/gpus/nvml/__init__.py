"""The one place that asks the NVIDIA driver, through NVML (``nvidia-ml-py``).

Readings are in bytes, percent, seconds and watts; ``None`` where the driver does not report it. GPUs are found by UUID,
never by index: NVML sees every GPU of the machine, whatever ``CUDA_VISIBLE_DEVICES`` says. ``nvml.probe``, which a pick
does not need, is imported by who needs it.
"""

from lightning_gpu_tools.gpus.nvml.inventory import identified, pids_are_ours, read_gpus
from lightning_gpu_tools.gpus.nvml.session import session
from lightning_gpu_tools.gpus.nvml.topology import read_cpu_affinity, read_numa_nodes, read_nvlinks

__all__ = [
    "identified",
    "pids_are_ours",
    "read_cpu_affinity",
    "read_gpus",
    "read_numa_nodes",
    "read_nvlinks",
    "session",
]
