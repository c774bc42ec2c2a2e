"""Causes of out-of-memory errors. Each has one file with everything about it, and the folder is the registry.

All sizes are in bytes.
"""

from __future__ import annotations

from lightning_gpu_tools.advice.cause import MemoryCause, Ruling, in_folder
from lightning_gpu_tools.advice.findings import Evidence, Finding, counted
from lightning_gpu_tools.advice.lines import holding, in_words
from lightning_gpu_tools.advice.memory_remedies import needed_bytes
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes

MEMORY_CAUSES: dict[str, MemoryCause] = in_folder(__name__, __path__)  # by name, in the order in which they are judged


def judge(run: RunMeasurements, oom: OutOfMemory) -> tuple[tuple[Finding, ...], str, str]:
    """Return the causes in order, why memory ran out, and what to do now."""
    found: list[tuple[str, Ruling]] = []
    for name, cause in sorted(MEMORY_CAUSES.items(), key=lambda item: item[1].is_last_resort):
        find = cause.find_on_host if oom.message.source == "host" else cause.find
        if find is not None and not (cause.is_last_resort and found):
            found += [(name, ruling) for ruling in find(run, oom)]
    evidence = _common_evidence(oom)
    findings = tuple(
        counted(name, 0.0, {**evidence, **one.evidence}, " ".join(filter(None, one.advice))) for name, one in found
    )
    who = f"Rank {oom.rank}: " if len(run.ranks) > 1 or oom.rank else ""
    return findings, f"{who}{_what(oom)} {found[0][1].why}", findings[0].advice


def _what(oom: OutOfMemory) -> str:
    message, parts = oom.message, []
    if message.requested_bytes:
        at = "" if oom.asked is None else f" at {in_words(*oom.asked[3:])}"
        parts.append(f"{message.name} asked for {format_bytes(message.requested_bytes)}{at}")
    # If the driver keeps the free memory (cudaMallocAsync), a limit on torch counts only tensors.
    held = oom.allocated_bytes if oom.is_pool_of_driver else oom.reserved_bytes
    if message.allowed_bytes is not None and held is not None:
        parts.append(f"it uses {format_bytes(held)} of the {format_bytes(message.allowed_bytes)} allowed")
    elif oom.free_bytes is not None and oom.total_bytes is not None and message.source != "host":
        parts.append(f"{format_bytes(oom.free_bytes)} of {format_bytes(oom.total_bytes)} were free")
    return f"Out of memory in {oom.place} at step {oom.step}{': ' if parts else ''}{'; '.join(parts)}."


def _common_evidence(oom: OutOfMemory) -> Evidence:
    reserved, allocated = oom.reserved_bytes, oom.allocated_bytes
    return {
        "phase": oom.phase,
        "step": oom.step,
        "requested_bytes": oom.message.requested_bytes,
        "free_bytes": oom.free_bytes,
        "total_bytes": oom.total_bytes,
        "allowed_bytes": oom.message.allowed_bytes,
        "allocated_bytes": allocated,
        "cached_bytes": None if reserved is None or allocated is None else reserved - allocated,
        "others_bytes": oom.others_bytes or None,
        "needed_bytes": None if oom.message.source == "host" else needed_bytes(oom),
        "begin_bytes": oom.begin_bytes,
        "asked_at": None if oom.asked is None else in_words(*oom.asked[3:]),
        "source_lines": holding(oom.lines),
    }
