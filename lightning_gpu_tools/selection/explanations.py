"""What a selection says to people: why these GPUs, and what to do if a model is too big for any one of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from lightning_gpu_tools.gpus.readings import GpuClaim, GpuReading
from lightning_gpu_tools.selection.ranking import Candidate, Requirements, label, rank_gpus
from lightning_gpu_tools.units import format_bytes


def why_picked(chosen: Sequence[Candidate], visible: Sequence[GpuReading]) -> str:
    """Return the sentence that names the picked GPUs and what spoke for them."""
    parts = []
    for candidate in chosen:
        free, percent = candidate.effective_free_bytes, candidate.gpu.utilization_percent
        memory = "free memory unknown" if free is None else f"{format_bytes(free)} free"
        load = "utilization unknown" if percent is None else f"{percent:.0f} % busy"
        claimed = ", claimed by others, too" if candidate.whole_claims else ""
        parts.append(f"{label(candidate.gpu)} with {memory}, {load}{claimed}")
    return f"Picked {'; '.join(parts)}: idle before busy, then the most free memory, out of {len(visible)} visible."


def sharding_hint(
    gpus: Sequence[GpuReading],
    others: Sequence[GpuClaim],
    requirements: Requirements,
    own_process_ids: Collection[int],
) -> str:
    """Return what to do if no GPU is large enough but several together are; else nothing."""
    needed_bytes = requirements.min_free_bytes or 0
    relaxed = replace(requirements, min_free_bytes=None, count=max(2, requirements.count))
    candidates = rank_gpus(gpus, others, relaxed, own_process_ids).candidates
    free_bytes = sorted((one.effective_free_bytes or 0 for one in candidates), reverse=True)
    enough = next((n for n in range(2, len(free_bytes) + 1) if sum(free_bytes[:n]) >= needed_bytes), None)
    if enough is None or free_bytes[0] >= needed_bytes:
        return ""
    sizes = ", ".join(map(format_bytes, free_bytes[:enough]))
    return (
        f" No single GPU has {format_bytes(needed_bytes)} free, but {enough} together do ({sizes}): a model that is "
        f"too big for one can be split over {enough} with FSDP (strategy='fsdp_free_memory') or ModelParallelStrategy; "
        f"min_free then is what each of them has to hold."
    )
