"""What CUDA and torch do with the GPUs, found without starting CUDA or importing torch in this process.

The rules for ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` are those of the CUDA programming guide, "Environment
variables", and of the MIG user guide, "Device names". For repeated entries, blanks, and text after a number, which
neither covers, they are those of PyTorch's parser (``torch/cuda/__init__.py``). Its authors compared it with driver
525.60.13 (pytorch PR 92315).
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from lightning_gpu_tools.errors import LightningGpuToolsError
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.processes import read_kernel_file
from lightning_gpu_tools.selection.ranking import TorchBuild
from lightning_gpu_tools.units import plural, printable

_T = TypeVar("_T")
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


def _entries(text: str) -> list[int | str | None]:
    """Return all entries, numbers or (prefixes of) UUIDs; ``None`` for each that cannot name a device.

    One that differs in kind from the first cannot. Any text may follow a number (``"1gpu2"`` is 1).
    """
    for prefix in ("GPU-", "MIG-"):
        if text.startswith(prefix):
            # Blanks matter here: " GPU-b" does not begin with "GPU-".
            return [entry if entry.startswith(prefix) else None for entry in text.split(",")]
    numbers = [re.match(r"[+-]?\d+", entry.strip()) for entry in text.split(",")]
    return [int(match[0]) if match and int(match[0]) >= 0 else None for match in numbers]


def visible_gpus(
    gpus: Sequence[GpuReading], cuda_visible_devices: str | None, order: str | None = "PCI_BUS_ID"
) -> tuple[GpuReading, ...]:
    """Return the GPUs and MIG instances that a program may use, in CUDA's order.

    A GPU in MIG mode stands for all its instances: CUDA shows a process only the first, but any of them by UUID.
    ``gpus`` are all GPUs of the machine in PCI order; ``order`` is the value of ``CUDA_DEVICE_ORDER``.
    """
    if cuda_visible_devices is None:
        return whole_or_instances(gpus)
    # CUDA ignores the entries after one that it cannot use.
    entries: tuple[int | str, ...] = _distinct_until_none(_entries(cuda_visible_devices))
    numbered = gpus
    # GPUs of the same product are in PCI order in both modes.
    if order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1 and entries and isinstance(entries[0], int):
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        numbered = [by_uuid[uuid] for uuid in device_order() if uuid in by_uuid]

    def find(entry: int | str) -> GpuReading | None:
        if isinstance(entry, int):
            return numbered[entry] if entry < len(numbered) else None
        devices = [device for gpu in gpus for device in (gpu, *gpu.mig_instances)]
        matches = [device for device in devices if device.uuid and device.uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None

    return whole_or_instances(_distinct_until_none(map(find, entries)))


def few_visible(gpus: Sequence[GpuReading], cuda_visible_devices: str) -> str:
    """Return a sentence on a mask that shows too few of the machine's GPUs: its first entry that shows none."""
    entries = cuda_visible_devices.split(",")
    shown = [len(visible_gpus(gpus, ",".join(entries[: number + 1]))) for number in range(len(entries))]
    fault = next((entry for number, entry in enumerate(entries) if shown[number] <= number), None)
    if fault is None:
        return ""
    return (
        f"In CUDA_VISIBLE_DEVICES={cuda_visible_devices!r}, {fault!r} names no GPU, or one again. This machine has "
        f"{plural(len(gpus), 'GPU')}, numbered from 0. Correct it, or unset it."
    )


def shown_uuid(gpus: Sequence[GpuReading], cuda_visible_devices: str | None, cuda_uuid: str) -> str:
    """Return the driver's UUID of the MIG instance that is this process's only CUDA device.

    ``cuda_uuid`` is CUDA's UUID of the device, without a prefix: the UUID of the instance or, in older versions, of its
    GPU. Without ``gpus``, the mask must contain the full UUID.
    """
    gpu_of = {str(part.uuid): gpu.uuid for gpu in gpus for part in gpu.mig_instances}
    if f"MIG-{cuda_uuid}" in gpu_of:
        return f"MIG-{cuda_uuid}"
    for visible in visible_gpus(gpus, cuda_visible_devices):
        if gpu_of.get(str(visible.uuid)) == f"GPU-{cuda_uuid}":
            return str(visible.uuid)
    first = (cuda_visible_devices or "").split(",")[0]
    return first if first.startswith("MIG-") else f"GPU-{cuda_uuid}"


def whole_or_instances(gpus: Iterable[GpuReading]) -> tuple[GpuReading, ...]:
    """Return the GPUs, with GPUs in MIG mode replaced by their instances."""
    return tuple(part for gpu in gpus for part in (gpu.mig_instances or (gpu,)))


def _distinct_until_none(items: Iterable[_T | None]) -> tuple[_T, ...]:
    """Return the items before the first ``None``; empty if an item is repeated."""
    found: list[_T] = []
    for item in items:
        if item is None:
            break
        if item in found:
            return ()
        found.append(item)
    return tuple(found)


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
