"""Explain an out-of-memory error: where memory ran out, and what filled it. Warn of what will fill memory later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gpu_tools.advice.causes import MEMORY_CAUSES
from lightning_gpu_tools.advice.findings import Evidence, Finding, known
from lightning_gpu_tools.advice.lines import holding, in_words
from lightning_gpu_tools.advice.memory_remedies import needed_bytes
from lightning_gpu_tools.advice.out_of_memory import MemoryFacts, OutOfMemory
from lightning_gpu_tools.memory.readings import MemoryGrowth
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes


def explain_error(facts: MemoryFacts) -> tuple[list[Finding], str]:
    """Return the causes of an error, the first one first, and the reason for the verdict."""
    is_of_host = facts.oom.message.source == "host"
    findings: list[Finding] = []
    for cause in MEMORY_CAUSES.values():
        if (cause.is_on_host or not is_of_host) and not (cause.is_last_resort and findings):
            findings += cause.find(facts)
    evidence = known(_common_evidence(facts.oom))
    findings = [replace(finding, evidence={**evidence, **finding.evidence}) for finding in findings]
    return findings, f"{_what_happened(*facts)} {findings[0].why}"


def early_warnings(run: RunMeasurements, growth: Sequence[MemoryGrowth]) -> list[Finding]:
    """Return what will fill memory, or holds it without need, before it is full."""
    early = (cause.find_early for cause in MEMORY_CAUSES.values() if cause.find_early is not None)
    return [finding for find in early for finding in find(run, growth)]


def _what_happened(run: RunMeasurements, oom: OutOfMemory) -> str:
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
    who = f"Rank {oom.rank}: " if len(run.ranks) > 1 or oom.rank else ""
    return f"{who}Out of memory in {oom.place} at step {oom.step}{': ' if parts else ''}{'; '.join(parts)}."


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
