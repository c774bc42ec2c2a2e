"""other_processes: other processes hold so much of the GPU that this one does not fit.

Without the processes that the driver lists, and the used memory that it lists for no process, this job would fit. If
this job now needs more than it could have had after its first step, others are not the cause.
"""

from collections.abc import Sequence

from lightning_gpu_tools.advice.findings import Cause, Findings, new_finding
from lightning_gpu_tools.advice.out_of_memory import MIN_SHARE, ErrorFacts, another_gpu
from lightning_gpu_tools.gpus.readings import FOREIGN, GpuProcess
from lightning_gpu_tools.units import format_bytes, printable

_LEFT_OVER_SHARE = 0.5  # our default: of other jobs' memory; from here on, leftover processes are the cause


def find(facts: ErrorFacts) -> Findings:
    run, oom = facts
    if not others_are_the_cause(facts) or left_over(facts):
        return
    needed, unlisted = facts.needed, facts.unlisted_bytes
    who = [named(oom.others[:3])] if oom.others else []
    if unlisted:
        who.append(f"{format_bytes(unlisted)} belong to processes that are not visible from here")
    wait = (
        f"No other GPU has that much free. Wait for one: lightning-gpu-tools run --min-free {needed} --wait 2h -- CMD."
    )
    pick = "FreeMemoryCUDAAccelerator" if run.has_trainer else "select_gpus"
    yield new_finding(
        f"Other processes hold {format_bytes(facts.others_bytes)} of this GPU: {', '.join(who)}.",
        f"This job needs {needed}.",
        another_gpu(facts) or wait,
        f"{pick}(min_free='{needed}') claims it.",
    )


def others_are_the_cause(facts: ErrorFacts) -> bool:
    """Return whether this job would fit, or would still fit, without other jobs' memory."""
    oom, size, room, memory = facts.oom, facts.others_bytes, facts.room_bytes, facts.full_memory
    missing = max(0, oom.requested_bytes - (oom.free_bytes or 0))
    if not size or size < missing or oom.total_bytes is None or room is None or oom.allowed_bytes is not None:
        return False
    if memory is None:
        return size >= MIN_SHARE * oom.total_bytes and facts.needed_bytes <= oom.total_bytes
    # It would fit in what torch has held, or in the room that it had before others came.
    peaks = [memory.latest.peak_reserved_bytes, 0 if oom.reading is None else oom.reading.peak_reserved_bytes]
    if min(size, memory.room_bytes - room) >= MIN_SHARE * oom.total_bytes:
        peaks.append(memory.room_bytes)
    return room + missing <= max(peaks)


def left_over(facts: ErrorFacts) -> list[GpuProcess]:
    """Return processes left over by ended programs; none if they hold too little of the others' memory."""
    orphans = [process for process in facts.oom.others if process.pid in facts.oom.orphans]
    size = sum(process.memory_used_bytes or 0 for process in orphans)
    return orphans if size >= _LEFT_OVER_SHARE * facts.others_bytes else []


def named(processes: Sequence[GpuProcess]) -> str:
    """Return a phrase with the processes, their owners, and their memory."""
    found = []
    for one in processes:
        name = f" ({printable(one.name, 40)})" if one.name else ""
        owner = f" of {printable(one.user, 40)}" if one.user else ""
        size = "an unknown amount" if one.memory_used_bytes is None else format_bytes(one.memory_used_bytes)
        process = FOREIGN if one.is_foreign else f"process {one.pid}{name}{owner}"
        found.append(f"{process} holds {size}")
    return ", ".join(found)


CAUSE = Cause(
    says="Other processes hold ... of this GPU, with PID, owner and name if they are visible",
    change="another GPU of this machine, if one has enough room, with the `pick` command; `min_free`",
    find=find,
    verified_on="hardware",
)
