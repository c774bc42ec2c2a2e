"""Single calls of NVML, and its errors as answers or in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from lightning_gpu_tools.gpus.readings import UtilizationSample
from lightning_gpu_tools.units import printable

# This hardware, driver or user never gets an answer.
NEVER = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission)

# After one of these, nothing about the GPU can be read.
GONE = (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired, pynvml.NVMLError_Uninitialized)


def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call NVML; ``None`` where it answers with one of ``NEVER``."""
    try:
        return function(*arguments)
    except NEVER:
        return None


def product_name(handle: Any) -> str | None:
    """Return the product's name, printable; ``None`` if the driver does not report it in UTF-8."""
    try:
        name = ask(pynvml.nvmlDeviceGetName, handle)
    except UnicodeDecodeError:
        return None
    return None if name is None else printable(name)


def tolerate(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call NVML; ``None`` on every failure, and if an argument is ``None``."""
    if None in arguments:
        return None
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def utilization_samples(handle: Any, last_us: int) -> tuple[list[UtilizationSample], int]:
    """Return the driver's samples after ``last_us``, oldest first, and the driver's time of the newest one."""
    try:
        _, answer = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, last_us)
    except pynvml.NVMLError_NotFound:  # nothing newer
        return [], last_us
    # In no documented order, with values far above 100: https://github.com/Syllo/nvtop/issues/110
    pairs = sorted(
        (stamp_us, percent)
        for sample in answer
        if (stamp_us := sample.timeStamp) > last_us and (percent := sample.sampleValue.uiVal) <= 100
    )
    samples = [UtilizationSample(time_s=stamp_us / 1e6, percent=float(percent)) for stamp_us, percent in pairs]
    return samples, pairs[-1][0] if pairs else last_us


def process_utilization(handle: Any, last_us: int) -> tuple[dict[int, float], int]:
    """Return how busy each process kept the GPU since ``last_us``, in percent, and the driver's newest time."""
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, last_us)
    except pynvml.NVMLError_NotFound:  # nobody used it
        return {}, last_us
    # One sample a process, likewise.
    percents = {one.pid: float(one.smUtil) for one in samples if one.timeStamp > last_us and one.smUtil <= 100}
    return percents, max((one.timeStamp for one in samples), default=last_us)


def why_unreadable(error: pynvml.NVMLError) -> str:
    """Say why one GPU cannot be read, and what to do."""
    if isinstance(error, pynvml.NVMLError_GpuIsLost):
        return "it has fallen off the bus (GPU is lost): see `dmesg` for its Xid error, then reset the GPU or reboot"
    if isinstance(error, pynvml.NVMLError_ResetRequired):
        return "it needs a reset: run `nvidia-smi --gpu-reset` as root, or reboot"
    if isinstance(error, pynvml.NVMLError_NoPermission):
        return "no permission to read it: is /dev/nvidia* accessible, and the GPU given to this container or job?"
    if isinstance(error, pynvml.NVMLError_Timeout):
        return "the driver did not answer in time: try again, then see `dmesg` and reset the GPU"
    if isinstance(error, pynvml.NVMLError_NotFound):
        return "the driver does not know this UUID, or no longer: see `nvidia-smi -L`"
    return f"the driver answered {str(error)!r}: see `nvidia-smi` and `dmesg`"
