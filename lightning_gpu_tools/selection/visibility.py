"""Which GPUs a program sees: CUDA's rules for ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``.

Sources: CUDA programming guide, "Environment variables"; MIG user guide, "Device names". Both are silent on repeated
entries, blanks and text after a number; there the rules are those of PyTorch's parser (``torch/cuda/__init__.py``),
which its authors compared with driver 525.60.13 (pytorch PR 92315).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lightning_gpu_tools.gpus.readings import GpuReading

_T = TypeVar("_T")

_INTEGER = re.compile(r"[+-]?\d+")


def parse_visible_devices(text: str) -> tuple[int | str, ...]:
    """Return the entries of a ``CUDA_VISIBLE_DEVICES`` that CUDA would consider: numbers, or UUIDs or their beginnings.

    Like CUDA it stops at the first entry that cannot name a device (``"0,2,-1,1"`` gives ``(0, 2)``), the first entry
    decides between numbers, ``GPU-`` and ``MIG-``, a repeated entry makes the whole list empty, and an integer may be
    followed by anything (``"1gpu2"`` is 1).
    """
    for prefix in ("GPU-", "MIG-"):
        if text.startswith(prefix):
            # Blanks count here: " GPU-b" does not begin with "GPU-".
            return _distinct_until([entry if entry.startswith(prefix) else None for entry in text.split(",")])
    numbers = [_INTEGER.match(entry.strip()) for entry in text.split(",")]
    return _distinct_until([int(match[0]) if match and int(match[0]) >= 0 else None for match in numbers])


def visible_gpus(
    gpus: Sequence[GpuReading],
    cuda_visible_devices: str | None,
    device_order: str | None,
    ask_cuda_order: Callable[[], Sequence[str]],
) -> tuple[GpuReading, ...]:
    """Return the GPUs and MIG instances that a program may use, in the order in which CUDA numbers them.

    A GPU that is divided into MIG instances stands for all of them, although CUDA shows a process only the first: by
    its UUID a program can be given any.

    Args:
        gpus: All GPUs of the machine in PCI order.
        cuda_visible_devices: Value of the variable, ``None`` if it is not set.
        device_order: Value of ``CUDA_DEVICE_ORDER``, ``None`` if it is not set.
        ask_cuda_order: Returns the UUIDs in CUDA's own order, the fastest first. Only called where the answer depends
            on it: numbers in the list, different products in the machine, and no ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """
    if cuda_visible_devices is None:
        return _instances(gpus)
    entries = parse_visible_devices(cuda_visible_devices)
    if any(isinstance(entry, int) for entry in entries):
        numbered = gpus
        # Identical products are in PCI order in both modes.
        if device_order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
            by_uuid = {gpu.uuid: gpu for gpu in gpus}
            numbered = [by_uuid[uuid] for uuid in ask_cuda_order() if uuid in by_uuid]
        found = [numbered[entry] if isinstance(entry, int) and entry < len(numbered) else None for entry in entries]
        return _instances(_distinct_until(found))
    nameable = [*gpus, *(instance for gpu in gpus for instance in gpu.mig_instances)]
    return _instances(_distinct_until([_find(str(entry), nameable) for entry in entries]))


def _find(beginning: str, gpus: Sequence[GpuReading]) -> GpuReading | None:
    """Return the one GPU or instance whose UUID begins like this; ``None`` if there is none or more than one."""
    matches = [gpu for gpu in gpus if gpu.uuid and gpu.uuid.startswith(beginning)]
    return matches[0] if len(matches) == 1 else None


def _instances(gpus: Sequence[GpuReading]) -> tuple[GpuReading, ...]:
    return tuple(part for gpu in gpus for part in (gpu.mig_instances or (gpu,)))


def _distinct_until(items: Iterable[_T | None]) -> tuple[_T, ...]:
    """Return what comes before the first ``None``, or nothing at all if something comes twice before it."""
    found: list[_T] = []
    for item in items:
        if item is None:
            break
        if item in found:
            return ()
        found.append(item)
    return tuple(found)
