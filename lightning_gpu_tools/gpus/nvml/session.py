"""The driver, open for this process, and why it cannot be."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import pynvml

from lightning_gpu_tools.errors import NvmlUnavailableError


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Keep the driver open; ``NvmlUnavailableError`` says why there is no usable one, and what to do.

    Every function of this package opens a session for itself. Open one around repeated reads: it may wake the GPUs up.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(why_unavailable(error)) from error
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == pid:  # a child that was forked in between has nothing to close
            with contextlib.suppress(pynvml.NVMLError):  # the driver went away by itself
                pynvml.nvmlShutdown()


def why_unavailable(error: pynvml.NVMLError) -> str:
    """Say why no GPU at all can be asked about, and what to do."""
    if isinstance(error, pynvml.NVMLError_LibraryNotFound):
        if sys.platform == "darwin":
            return "There is no NVIDIA driver for macOS."
        if sys.platform == "win32":
            return "nvml.dll, a part of the NVIDIA driver, was not found. Is the driver installed?"
        return (
            "libnvidia-ml.so.1, a part of the NVIDIA driver, was not found. Is the driver installed, and does "
            "`nvidia-smi` work? A container needs `--gpus all`, and `utility` in NVIDIA_DRIVER_CAPABILITIES."
        )
    if isinstance(error, pynvml.NVMLError_DriverNotLoaded):
        return (
            "The NVIDIA driver is installed but not loaded. Is there an NVIDIA GPU in this machine? Try "
            "`sudo modprobe nvidia`, and see `dmesg`."
        )
    if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
        return (
            "The loaded NVIDIA driver and its library libnvidia-ml have different versions: the driver was updated. "
            "Reboot, or restart the container."
        )
    if isinstance(error, pynvml.NVMLError_NoPermission):
        return (
            "No permission to use the NVIDIA driver. May this user open /dev/nvidiactl and /dev/nvidia0, and were they "
            "given to this container?"
        )
    if isinstance(error, pynvml.NVMLError_FunctionNotFound):
        return "The NVIDIA driver is too old: it lacks a function that nvidia-ml-py needs. Update the driver."
    return f"The NVIDIA driver cannot be used: NVML says {str(error)!r}. Does `nvidia-smi` work?"
