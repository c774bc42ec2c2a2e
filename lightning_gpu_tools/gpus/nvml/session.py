"""The driver, open for this process, and what it need be asked only once while it is."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pynvml

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus.nvml.calls import product_name


class Identity(NamedTuple):
    """What does not change about a GPU while the driver is open."""

    handle: Any
    uuid: str
    name: str | None = None
    pci: tuple[int, int, int] | None = None
    pci_bus_id: str | None = None


class _Session(threading.local):
    """The session that this thread is in: GPUs already looked up, by NVML index, and the process they are valid in."""

    pid = 0
    identities: dict[int, Identity]


_session = _Session()


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Keep the driver open. Inside another session of this thread it does nothing.

    Every function of this module opens one for itself. Open one around repeated reads: without persistence mode the
    first one has to wake the GPUs up, and what never changes (UUID, name, PCI address) is then asked only once.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver; the message says why and what to do.
    """
    outer = _session.pid
    if outer == os.getpid():
        yield
        return
    pid = open_driver()  # also in a forked child: the parent's handles are not valid here
    _session.pid, _session.identities = pid, {}
    try:
        yield
    finally:
        _session.pid = outer
        close_driver(pid)


def open_driver() -> int:
    """Open the driver for this process, once more if it is open already; return the process for ``close_driver``."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(why_unavailable(error)) from error
    return os.getpid()


def close_driver(pid: int) -> None:
    """Undo one ``open_driver`` of that process."""
    if os.getpid() == pid:  # a child that was forked in between has nothing to close
        with contextlib.suppress(pynvml.NVMLError):  # the driver went away by itself
            pynvml.nvmlShutdown()


def identify(nvml_index: int, brief: bool = False) -> Identity:
    """Return a GPU's identity, asked for only once in a session; ``brief`` is without name and PCI address.

    Raises:
        pynvml.NVMLError: It cannot be read.
    """
    known = _session.identities.get(nvml_index)
    if known is None:
        handle = pynvml.nvmlDeviceGetHandleByIndex(nvml_index)
        if brief:  # not kept: the next one to ask may want all of it
            return Identity(handle=handle, uuid=pynvml.nvmlDeviceGetUUID(handle))
        pci = pynvml.nvmlDeviceGetPciInfo(handle)
        known = _session.identities[nvml_index] = Identity(
            handle=handle,
            uuid=pynvml.nvmlDeviceGetUUID(handle),
            name=product_name(handle),
            pci=(pci.domain, pci.bus, pci.device),
            pci_bus_id=f"{pci.domain:08X}:{pci.bus:02X}:{pci.device:02X}.0",  # as nvidia-smi writes it
        )
    return known


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
