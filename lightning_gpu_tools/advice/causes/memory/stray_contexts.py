"""stray_contexts: other ranks of this job hold memory on this GPU, which is not theirs.

Each rank publishes its PID and its GPU. After the error, the driver lists the processes on this GPU and their memory.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings, new_finding
from lightning_gpu_tools.advice.out_of_memory import ErrorFacts
from lightning_gpu_tools.units import format_bytes, number_ranges


def find(facts: ErrorFacts) -> Findings:
    oom = facts.oom
    strays = [process for process in oom.others if process.pid in oom.strays]
    size, free = sum(process.memory_used_bytes or 0 for process in strays), oom.free_bytes or 0
    if not size or oom.total_bytes is None or oom.allowed_bytes is not None:
        return
    if oom.requested_bytes <= free + size and facts.needed_bytes <= oom.total_bytes:
        ranks = number_ranges(oom.strays[process.pid] for process in strays)
        yield new_finding(
            f"Ranks that train on other GPUs ({ranks}) hold {format_bytes(size)} of this GPU. Without them, "
            f"{format_bytes(free + size)} would be free.",
            "Call torch.cuda.set_device(local_rank) before anything else uses CUDA.",
            "Avoid 'cuda:0' and torch.load without map_location, which use another GPU.",
        )


CAUSE = Cause(
    says="Ranks that train on other GPUs (...) hold ... of this GPU",
    change="`torch.cuda.set_device(local_rank)` before anything else uses CUDA, `map_location` in `torch.load`",
    find=find,
    verified_on="simulated GPU",
)
