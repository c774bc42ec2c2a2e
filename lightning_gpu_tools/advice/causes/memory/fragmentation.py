"""fragmentation: torch holds enough free memory, but only in pieces that are too small.

Reads the counters of torch's allocator: the memory reserved beyond its tensors would suffice, but not in one piece.
"""

from lightning_gpu_tools.advice.findings import SMALLER_STEP, Cause, Findings, new_finding
from lightning_gpu_tools.advice.out_of_memory import MIN_SHARE, ErrorFacts, is_pool_of_driver
from lightning_gpu_tools.units import format_bytes, printable

_EXPANDABLE = "expandable_segments:True"
_PAGE_BYTES = 20 * 2**20  # of expandable segments (kLargeBuffer of torch's allocator); a gap's two ends lose about one


def find(facts: ErrorFacts) -> Findings:
    oom, room = facts.oom, facts.room_bytes or 0
    if oom.reading is None or not oom.requested_bytes or is_pool_of_driver(oom):
        return
    reserved = oom.reading.reserved_bytes
    # Memory kept by CUDA graphs is not a fragment.
    unused = reserved - facts.allocated_bytes - oom.graph_pool_bytes
    left = max(0, room - reserved)
    is_enough = unused >= oom.requested_bytes or left < oom.requested_bytes <= unused + left
    # The model alone may not fit even without fragments.
    if unused < MIN_SHARE * reserved or not is_enough or (room and oom.model.model_bytes > room):
        return
    settings = oom.allocator or "PYTORCH_CUDA_ALLOC_CONF="
    in_pages = oom.reading.inactive_split_bytes - oom.reading.inactive_splits * _PAGE_BYTES
    is_too_small = oom.reading.inactive_splits > 0 and in_pages + left < oom.requested_bytes
    advice = "Allocate long-lived tensors before training, or as one tensor, and use only a few batch shapes."
    if _EXPANDABLE not in settings.replace(" ", "") and not is_too_small:
        others = "" if settings.endswith("=") else ","
        advice = f"Set {printable(settings)}{others}{_EXPANDABLE} in the environment before training. {advice}"
    yield new_finding(
        f"torch holds {format_bytes(unused)} of unused memory, in pieces below {format_bytes(oom.requested_bytes)}.",
        advice,
    )


CAUSE = Cause(
    says="torch holds ... of unused memory, in pieces below ...",
    change="`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`; long-lived tensors before training, or as one tensor",
    find=find,
    settings=SMALLER_STEP,
    verified_on="hardware",
)
