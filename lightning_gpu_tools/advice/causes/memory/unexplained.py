"""unexplained: no known cause filled the memory.

More was free than was requested, or no counter shows what filled the memory. On the host, the report lists the
processes that grew.
"""

from lightning_gpu_tools.advice.causes.memory.batch_too_large import has_fitted
from lightning_gpu_tools.advice.findings import Cause, Findings, holding, new_finding
from lightning_gpu_tools.advice.out_of_memory import ErrorFacts, another_gpu, fewer_workers, place_of, why_host_is_full
from lightning_gpu_tools.units import format_bytes

_RECORD = "Record a torch memory snapshot: https://pytorch.org/blog/understanding-gpu-memory-1/."


def find(facts: ErrorFacts) -> Findings:
    run, oom = facts
    if oom.source == "host":
        find_them = "Find the processes that hold it with smem, or with top sorted by memory."
        yield new_finding(why_host_is_full(oom), find_them, fewer_workers(run))
        return
    free, requested = oom.free_bytes, oom.requested_bytes
    if free is not None and requested and free > requested and oom.allowed_bytes is None:
        why = "More was free than was requested: another process held it a moment before, or a limit applies."
    elif has_fitted(facts) and oom.memory is not None:
        why = f"Batches of this size fit before, and no step took more than {format_bytes(oom.memory.peak_bytes)}."
    else:
        why = f"What filled the memory is unknown. It was full in {place_of(oom)}."
        if facts.kept_bytes:
            why += f" When the step began, tensors outside the model held {format_bytes(facts.kept_bytes)}."
    if lines := holding(oom.lines):
        why += f" Most of the recorded memory was allocated at {lines}."
    yield new_finding(why, _RECORD, another_gpu(facts))


CAUSE = Cause(
    says="More was free than was requested, or it is unknown what filled the memory",
    change="a torch memory snapshot",
    find=find,
    is_on_host=True,
    is_last_resort=True,
    verified_on="cpu",
)
