"""The driver, open for this process, and what it need be asked only once while it is."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pynvml

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus.nvml.calls import product_name
from lightning_gpu_tools.gpus.nvml.messages import why_unavailable


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
