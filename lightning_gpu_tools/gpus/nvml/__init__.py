"""The one place that asks the NVIDIA driver, through NVML (``nvidia-ml-py``).

Everything that NVML gives becomes a plain reading here: bytes, percent, seconds, watts; ``None`` where the driver does
not report it. GPUs are found by UUID, never by an index that ``CUDA_VISIBLE_DEVICES`` could have shifted: NVML always
sees every GPU of the machine. ``nvml.probe``, which a pick does not need, is imported by who needs it.
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
