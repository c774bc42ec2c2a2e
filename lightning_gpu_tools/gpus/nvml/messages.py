"""Why a GPU or the whole driver cannot be read, in words, and what to do."""

from __future__ import annotations

import sys

import pynvml


def why_unreadable(error: pynvml.NVMLError) -> str:
    """Say why one GPU cannot be read, and what to do."""
    if isinstance(error, pynvml.NVMLError_GpuIsLost):
        return "it has fallen off the bus (GPU is lost): see `dmesg` for its Xid error, then reset the GPU or reboot"
    if isinstance(error, pynvml.NVMLError_ResetRequired):
        return "it needs a reset: run `nvidia-smi --gpu-reset` as root, or reboot"
    if isinstance(error, pynvml.NVMLError_NoPermission):
        return "no permission to read it: is /dev/nvidia* accessible, and was this GPU given to this container or job?"
    if isinstance(error, pynvml.NVMLError_Timeout):
        return "the driver did not answer in time: try again; if it stays so, see `dmesg` and reset the GPU"
    if isinstance(error, pynvml.NVMLError_NotFound):
        return "the driver knows no GPU or MIG instance with this UUID (any more): see `nvidia-smi -L`"
    return f"the driver answered {str(error)!r}: see `nvidia-smi` and `dmesg`"


def why_unavailable(error: pynvml.NVMLError) -> str:
    """Say why no GPU at all can be asked about, and what to do."""
    if isinstance(error, pynvml.NVMLError_LibraryNotFound):
        if sys.platform == "darwin":
            return "There is no NVIDIA driver for macOS, so there are no GPUs that this package can read."
        if sys.platform == "win32":
            return "nvml.dll, a part of the NVIDIA driver, was not found. Is the driver installed?"
        return (
            "libnvidia-ml.so.1, a part of the NVIDIA driver, was not found. Is the driver installed, and does "
            "`nvidia-smi` work? A container must be started with `--gpus all` and NVIDIA_DRIVER_CAPABILITIES that "
            "include `utility`."
        )
    if isinstance(error, pynvml.NVMLError_DriverNotLoaded):
        return (
            "The NVIDIA driver is installed but not loaded. Is there an NVIDIA GPU in this machine? Try "
            "`sudo modprobe nvidia`, and see `dmesg` for why it was not loaded."
        )
    if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
        return (
            "The loaded NVIDIA driver and its library libnvidia-ml have different versions: the driver was updated "
            "since the last start. Reboot, or restart the container after an update of the host."
        )
    if isinstance(error, pynvml.NVMLError_NoPermission):
        return (
            "No permission to talk to the NVIDIA driver. May this user open /dev/nvidiactl and /dev/nvidia0, and were "
            "the devices given to this container?"
        )
    if isinstance(error, pynvml.NVMLError_FunctionNotFound):
        return "The NVIDIA driver is too old: it lacks a function that nvidia-ml-py needs. Update the driver."
    return f"The NVIDIA driver cannot be used: NVML says {str(error)!r}. Does `nvidia-smi` work?"
