"""fragmentation: torch holds enough free memory, but only in pieces that are too small.

Reads the counters of torch's allocator: the memory reserved beyond its tensors would suffice, but not in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.examples import FLAT, GIB, MIB, failed
from lightning_gpu_tools.advice.findings import SMALLER_STEP, Cause, Finding, new_finding
from lightning_gpu_tools.advice.out_of_memory import MIN_SHARE, MemoryFacts, is_pool_of_driver, room_bytes
from lightning_gpu_tools.units import format_bytes, printable

_EXPANDABLE = "expandable_segments:True"
_PAGE_BYTES = 20 * MIB  # of expandable segments (kLargeBuffer of torch's allocator); a gap's two ends lose about one


def find(facts: MemoryFacts) -> Iterator[Finding]:
    _, oom = facts
    if oom.reading is None or not oom.requested_bytes:
        return
    reserved, room = oom.reading.reserved_bytes, room_bytes(oom)
    # Memory kept by CUDA graphs is not a fragment.
    unused = reserved - oom.reading.allocated_bytes - oom.graph_pool_bytes
    left = max(0, (room or 0) - reserved)
    is_enough = unused >= oom.requested_bytes or left < oom.requested_bytes <= unused + left
    if room is not None and oom.model.model_bytes > room:
        return  # the model alone would not fit even without fragments
    if is_pool_of_driver(oom) or unused < MIN_SHARE * reserved or not is_enough:
        return
    together = ""
    if unused < oom.requested_bytes:
        together = f" In one piece, it would be enough, together with the {format_bytes(left)} that are free."
    settings = oom.allocator or "PYTORCH_CUDA_ALLOC_CONF="
    fewer = "Allocate long-lived tensors before training, or as one tensor, and use only a few batch shapes."
    in_pages = oom.reading.inactive_split_bytes - oom.reading.inactive_splits * _PAGE_BYTES
    if _EXPANDABLE in settings.replace(" ", ""):
        advice = f"{_EXPANDABLE} is set, so only gaps within pages of 20 MiB are lost. {fewer}"
    elif oom.reading.inactive_splits and in_pages + left < oom.requested_bytes:
        advice = f"{fewer} The gaps are too small for {_EXPANDABLE}, which needs whole pages of 20 MiB."
    else:
        others = "" if settings.endswith("=") else ","
        advice = (
            f"Set {printable(settings)}{others}{_EXPANDABLE} in the environment before training. Using only a few "
            "batch shapes also helps."
        )
    yield new_finding(
        f"torch holds {format_bytes(unused)} of unused memory, in pieces below {format_bytes(oom.requested_bytes)}."
        f"{together}",
        [advice],
        {"fragmented_bytes": unused},
    )


CAUSE = Cause(
    says="torch holds ... of unused memory, in pieces below ...",
    change="`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` (advised only here, because it frees no memory that is "
    "in use). If it is already set: allocate long-lived tensors before training, or as one tensor",
    find=find,
    settings=SMALLER_STEP,
    verified_on="hardware",
    sick=failed(begins=FLAT, allocated=18 * GIB, cached=5 * GIB),
    healthy=failed(begins=FLAT, cached=300 * MIB),
)
