"""GPU visibility: CUDA's rules for ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``.

Sources: CUDA programming guide, "Environment variables"; MIG user guide, "Device names". For repeated entries, blanks,
and text after a number, which neither covers, this follows PyTorch's parser (``torch/cuda/__init__.py``). Its authors
compared it with driver 525.60.13 (pytorch PR 92315).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lightning_gpu_tools.gpus.readings import GpuReading

_T = TypeVar("_T")
_PREFIXES = ("GPU-", "MIG-")


def _entries(text: str) -> list[int | str | None]:
    """Return all entries, numbers or (prefixes of) UUIDs; ``None`` for each that cannot name a device.

    One that differs in kind from the first cannot. Any text may follow a number (``"1gpu2"`` is 1).
    """
    for prefix in _PREFIXES:
        if text.startswith(prefix):
            # Blanks matter here: " GPU-b" does not begin with "GPU-".
            return [entry if entry.startswith(prefix) else None for entry in text.split(",")]
    numbers = [re.match(r"[+-]?\d+", entry.strip()) for entry in text.split(",")]
    return [int(match[0]) if match and int(match[0]) >= 0 else None for match in numbers]


def visible_gpus(
    gpus: Sequence[GpuReading],
    cuda_visible_devices: str | None,
    device_order: str | None,
    ask_cuda_order: Callable[[], Sequence[str]],
) -> tuple[GpuReading, ...]:
    """Return the GPUs and MIG instances that a program may use, in CUDA's order.

    A GPU in MIG mode stands for all its instances: CUDA shows a process only the first, but any of them by UUID.
    ``gpus`` are all GPUs of the machine in PCI order. ``ask_cuda_order`` is called only if the result needs it.
    """
    if cuda_visible_devices is None:
        return whole_or_instances(gpus)
    entries: tuple[int | str, ...] = _distinct_until_none(
        _entries(cuda_visible_devices)
    )  # CUDA ignores those after one that it cannot use
    numbered = gpus
    # GPUs of the same product are in PCI order in both modes.
    if device_order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1 and entries and isinstance(entries[0], int):
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        numbered = [by_uuid[uuid] for uuid in ask_cuda_order() if uuid in by_uuid]

    def find(entry: int | str) -> GpuReading | None:
        if isinstance(entry, int):
            return numbered[entry] if entry < len(numbered) else None
        matches = _beginning_with(entry, gpus)
        return matches[0] if len(matches) == 1 else None

    return whole_or_instances(_distinct_until_none(map(find, entries)))


def why_fewer(gpus: Sequence[GpuReading], cuda_visible_devices: str) -> str:
    """Explain why CUDA shows fewer GPUs than ``CUDA_VISIBLE_DEVICES`` lists; return ``""`` if it shows all of them."""
    if cuda_visible_devices.strip() in ("", "-1"):
        return "it hides all GPUs"
    there_are = "there is 1 (GPU 0)" if len(gpus) == 1 else f"there are {len(gpus)} (GPUs 0 to {len(gpus) - 1})"
    found: list[GpuReading] = []
    for text, entry in zip(cuda_visible_devices.split(","), _entries(cuda_visible_devices), strict=True):
        if entry is None:
            return f"{text!r} is no {'UUID' if cuda_visible_devices[:4] in _PREFIXES else 'number'} of a GPU"
        if isinstance(entry, int):
            named = [gpu for gpu in gpus if gpu.index == entry]
            problem = f"it names GPU {entry}; {there_are}"
        else:
            named = _beginning_with(entry, gpus)
            problem = f"{len(named) or 'no'} GPUs have a UUID that begins with {text!r}"
        if len(named) != 1:
            return problem
        if named[0] in found:
            return f"it names GPU {named[0].number} twice"
        found += named
    return ""


def shown_uuid(gpus: Sequence[GpuReading], cuda_visible_devices: str | None, cuda_uuid: str) -> str:
    """Return the driver's UUID of the MIG instance that is this process's only CUDA device.

    ``cuda_uuid`` is CUDA's UUID of the device, without a prefix: the UUID of the instance or, in older versions, of its
    GPU. Without ``gpus``, the mask must contain the full UUID.
    """
    parts = [(gpu, part) for gpu in gpus for part in gpu.mig_instances]
    if any(part.uuid == f"MIG-{cuda_uuid}" for _, part in parts):
        return f"MIG-{cuda_uuid}"
    here = {part.uuid for gpu, part in parts if gpu.uuid == f"GPU-{cuda_uuid}"}
    visible = visible_gpus(gpus, cuda_visible_devices, "PCI_BUS_ID", tuple)
    mask = (cuda_visible_devices or "").split(",")[0]
    otherwise = mask if mask.startswith("MIG-") else f"GPU-{cuda_uuid}"
    return next((str(part.uuid) for part in visible if part.uuid in here), otherwise)


def whole_or_instances(gpus: Iterable[GpuReading]) -> tuple[GpuReading, ...]:
    """Return the GPUs, with GPUs in MIG mode replaced by their instances."""
    return tuple(part for gpu in gpus for part in (gpu.mig_instances or (gpu,)))


def _beginning_with(start: str, gpus: Iterable[GpuReading]) -> list[GpuReading]:
    return [
        device for gpu in gpus for device in (gpu, *gpu.mig_instances) if device.uuid and device.uuid.startswith(start)
    ]


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
