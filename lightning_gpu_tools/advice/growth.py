"""Memory that grows steadily: what it means, and where to look."""

from __future__ import annotations

from lightning_gpu_tools.advice.findings import Finding, counted
from lightning_gpu_tools.training.memory_growth import MemoryGrowth
from lightning_gpu_tools.units import format_bytes, format_duration

_WHOSE = {
    "gpu": "The GPU memory in tensors between steps",
    "process": "The memory of the process",
    "workers": "The memory of the DataLoader's workers",
}
_IN_LISTS = (
    "Find what is kept from {what} to {what}: losses and outputs in lists (keep loss.item() or loss.detach()), caches, "
)
KEPT = {
    "gpu": _IN_LISTS + "metrics that are never reset.",
    "process": _IN_LISTS + "figures and loggers that are never closed.",
    # https://github.com/pytorch/pytorch/issues/13246: reading an object writes its reference count, so the kernel
    # copies the page on which it is.
    "workers": (
        "A worker copies each Python object of the dataset that it reads. Keep file names and labels in arrays (numpy, "
        "torch, pyarrow), not in lists or dicts. Caches in the dataset grow in each worker, too."
    ),
}


def pace(growth: MemoryGrowth) -> str:
    """Return how fast memory grows, in words."""
    where = f" in {growth.phase}" if growth.phase else ""
    end = "" if growth.left_s is None else f"; at this pace it is full in {format_duration(growth.left_s)}"
    rate = format_bytes(growth.bytes_per_s * 60)
    return f"{_WHOSE[growth.whose]} grows steadily, by {rate} a minute{where}{end}."


def growing_memory(growth: MemoryGrowth) -> Finding:
    """Return memory that grows as a finding, which costs no time until it is full."""
    evidence = {
        "whose": growth.whose,
        "bytes_per_minute": growth.bytes_per_s * 60,
        "grown_bytes": growth.grown_bytes,
        "left_s": growth.left_s,
        "phase": growth.phase,
    }
    advice = KEPT[growth.whose].format(what="validation batch" if growth.phase == "validation" else "step")
    return counted("memory_growth", 0.0, evidence, f"{pace(growth)} {advice}")
