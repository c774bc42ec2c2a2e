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


def parse_visible_devices(text: str) -> tuple[int | str, ...]:
    """Return the entries of ``CUDA_VISIBLE_DEVICES`` that CUDA uses: numbers, or (prefixes of) UUIDs.

    The list ends before the first entry that cannot name a device (``"0,2,-1,1"`` gives ``(0, 2)``) or differs in kind
    from the first. A repeated entry makes the list empty, and any text may follow a number (``"1gpu2"`` is 1).
    """
    for prefix in ("GPU-", "MIG-"):
        if text.startswith(prefix):
            # Blanks matter here: " GPU-b" does not begin with "GPU-".
            return _distinct_until_none(entry if entry.startswith(prefix) else None for entry in text.split(","))
    numbers = [re.match(r"[+-]?\d+", entry.strip()) for entry in text.split(",")]
    return _distinct_until_none(int(match[0]) if match and int(match[0]) >= 0 else None for match in numbers)


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
    entries = parse_visible_devices(cuda_visible_devices)
    numbered = gpus
    # GPUs of the same product are in PCI order in both modes.
    if device_order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1 and entries and isinstance(entries[0], int):
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        numbered = [by_uuid[uuid] for uuid in ask_cuda_order() if uuid in by_uuid]
    nameable = [*gpus, *(instance for gpu in gpus for instance in gpu.mig_instances)]

    def find(entry: int | str) -> GpuReading | None:
        if isinstance(entry, int):
            return numbered[entry] if entry < len(numbered) else None
        matches = [gpu for gpu in nameable if gpu.uuid and gpu.uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None

    return whole_or_instances(_distinct_until_none(map(find, entries)))


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
