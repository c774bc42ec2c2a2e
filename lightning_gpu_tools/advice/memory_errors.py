"""The causes of an out-of-memory error, and what they warn of before memory is full."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpu_tools.advice.causes import MEMORY_CAUSES
from lightning_gpu_tools.advice.findings import Evidence, Finding, known
from lightning_gpu_tools.advice.lines import holding, in_words
from lightning_gpu_tools.advice.out_of_memory import (
    begin_bytes,
    is_pool_of_driver,
    needed_bytes,
    others_bytes,
    place_of,
)
from lightning_gpu_tools.memory.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes


def early_warnings(run: RunMeasurements) -> list[Finding]:
    """Return what will fill memory, or holds it without need, before it is full."""
    findings = []
    for name, cause in MEMORY_CAUSES.items():
        if cause.find_early is not None:
            findings += [replace(finding, cause=name) for finding in cause.find_early(run)]
    return findings


def explain_error(run: RunMeasurements, oom: OutOfMemory) -> tuple[list[Finding], str]:
    """Return the causes of an error, the first one first, and the reason for the verdict."""
    findings: list[Finding] = []
    for name, cause in MEMORY_CAUSES.items():
        if (cause.is_on_host or oom.source != "host") and not (cause.is_last_resort and findings):
            findings += [replace(finding, cause=name) for finding in cause.find((run, oom))]
    reading = oom.reading
    evidence: Evidence = {
        "phase": oom.phase,
        "step": oom.step,
        "requested_bytes": oom.requested_bytes or None,
        "free_bytes": oom.free_bytes,
        "total_bytes": oom.total_bytes,
        "allowed_bytes": oom.allowed_bytes,
        "allocated_bytes": None if reading is None else reading.allocated_bytes,
        "cached_bytes": None if reading is None else reading.reserved_bytes - reading.allocated_bytes,
        "others_bytes": others_bytes(oom) or None,
        "needed_bytes": None if oom.source == "host" else needed_bytes(oom),
        "begin_bytes": begin_bytes(oom),
        "asked_at": None if oom.asked is None else in_words(*oom.asked[3:]),
        "source_lines": holding(oom.lines),
    }
    findings = [replace(finding, evidence={**known(evidence), **finding.evidence}) for finding in findings]
    parts = []
    if oom.requested_bytes:
        at = "" if oom.asked is None else f" at {in_words(*oom.asked[3:])}"
        parts.append(f"{oom.name} asked for {format_bytes(oom.requested_bytes)}{at}")
    # If the driver keeps the free memory (cudaMallocAsync), a limit on torch counts only tensors.
    if oom.allowed_bytes is not None and reading is not None:
        held = reading.allocated_bytes if is_pool_of_driver(oom) else reading.reserved_bytes
        parts.append(f"it uses {format_bytes(held)} of the {format_bytes(oom.allowed_bytes)} allowed")
    elif oom.free_bytes is not None and oom.total_bytes is not None and oom.source != "host":
        parts.append(f"{format_bytes(oom.free_bytes)} of {format_bytes(oom.total_bytes)} were free")
    who = f"Rank {oom.rank}: " if len(run.ranks) > 1 or oom.rank else ""
    where = f"{who}Out of memory in {place_of(oom)} at step {oom.step}{': ' if parts else ''}{'; '.join(parts)}."
    return findings, f"{where} {findings[0].why}"
