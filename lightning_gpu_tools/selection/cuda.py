"""Facts that only CUDA and torch know, found without starting CUDA or importing torch in this process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterable

from lightning_gpu_tools.errors import LightningGpuToolsError
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.processes import read_kernel_file
from lightning_gpu_tools.selection.ranking import TorchBuild
from lightning_gpu_tools.units import printable

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED, cuda.h
_LIMIT_S = 10.0  # our default: CUDA starts in one or two seconds, and other jobs wait for the claims until then
_LIBRARY = "libcuda.so.1"
_PRINT_UUIDS = f"""
import ctypes, uuid
cuda = ctypes.CDLL({_LIBRARY!r})
count = ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for ordinal in range(count.value):
    device, raw = ctypes.c_int(), ctypes.create_string_buffer(16)
    assert cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0 and cuda.cuDeviceGetUuid(raw, device) == 0
    print(f"GPU-{{uuid.UUID(bytes=raw.raw)}}")
"""

# What torch.cuda.get_arch_list() returns is a text in this library (CUDA_ARCH_FLAGS in torch/csrc/cuda/Module.cpp).
_TORCH_LIBRARY = "lib/libtorch_python.so"
_ARCHITECTURES = re.compile(rb"\0(sm_\d+[af]?(?: (?:sm|compute)_\d+[af]?)*)\0")
# All wheels of torch 2.6 and later have code for these compute capabilities and those between. Source:
# TORCH_CUDA_ARCH_LIST in torch's .ci/manywheel/build_cuda.sh; those for ARM servers have none before 8.0.
_OLDEST, _NEWEST = (8, 0), (9, 0)
_WHEEL = re.compile(r"\d+\.\d+\.\d+\+cu\d+")
_VERSION = re.compile(r"^(__version__|cuda)\b.*= '(.+)'", re.MULTILINE)


def is_initialized() -> bool:
    """Return whether CUDA has started in this process, so that changes to ``CUDA_VISIBLE_DEVICES`` have no effect."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    # torch.cuda.is_available() can start CUDA without torch recording it, and libraries other than torch use CUDA.
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:  # not even loaded
        return False
    return bool(library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


@functools.cache
def device_order() -> tuple[str, ...]:
    """Return the UUIDs of all GPUs in CUDA's order, from a child process, because CUDA must not start here."""
    import subprocess  # this import takes a tenth of the time of a pick, and few machines need it

    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", _PRINT_UUIDS], env=environment, stdout=pipe, stderr=pipe, text=True)
    late = ""
    try:
        uuids, _ = child.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        late = f" within {_LIMIT_S:.0f} s"
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging driver call also delays the end of the child
            child.communicate(timeout=1)
    if child.returncode != 0:
        raise LightningGpuToolsError(
            f"CUDA did not report the order of its devices{late}, which the numbers in CUDA_VISIBLE_DEVICES depend on. "
            "Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or use UUIDs in CUDA_VISIBLE_DEVICES."
        )
    return tuple(uuids.split())


def installed_torch(gpus: Iterable[GpuReading]) -> TorchBuild | None:
    """Return the CUDA build of torch that this Python would import, if it may lack code for one of the GPUs.

    ``None`` if it has code for all of them, if there is no such build, or if its code is unknown.
    """
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        facts = dict(_VERSION.findall(read_kernel_file(os.path.join(folder, "version.py"))))
        version = printable(facts.get("__version__", ""))
        capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
        is_known = _WHEEL.fullmatch(version) and all(_OLDEST <= capability <= _NEWEST for capability in capabilities)
        if "cuda" not in facts or is_known:  # without CUDA: a build for the CPU or for AMD
            return None
        if codes := _codes_in(os.path.join(folder, _TORCH_LIBRARY)):
            return TorchBuild(version, codes)
    return None


@functools.cache
def _codes_in(library: str) -> tuple[str, ...]:
    """Return the GPU code in a library of torch; empty if unknown. Takes 20 ms: half as long as a pick.

    torch.cuda.get_arch_list() would need an imported torch, which takes a second.
    """
    import mmap  # not needed elsewhere

    with (
        contextlib.suppress(OSError, ValueError),  # another layout, as on Windows; an empty file
        open(library, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        found = _ARCHITECTURES.search(content)
        return tuple(found[1].decode().split()) if found else ()
    return ()
