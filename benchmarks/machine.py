"""Description of the machine, for result files."""

import importlib.metadata
import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

import psutil

import lightning_gpu_tools

PACKAGES = ("torch", "lightning", "nvidia-ml-py")


def describe_machine(*packages: str) -> dict[str, Any]:
    """Return processor, cores, memory, GPUs, and the versions of Python, of this package, and of further packages."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor()
    return {
        "date": date.today().isoformat(),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpu_names(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in (*PACKAGES, *packages)},
        "lightning-gpu-tools": lightning_gpu_tools.__version__,
    }


def _gpu_names() -> list[str]:
    import torch

    kind = " (simulated GPU, torch's CUDA build)" if "SIMULATED_CUDA" in os.environ else ""
    return [torch.cuda.get_device_name(i) + kind for i in range(torch.cuda.device_count())]
