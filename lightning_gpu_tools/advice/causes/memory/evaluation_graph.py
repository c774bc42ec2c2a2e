"""evaluation_graph: validation keeps its results with their graph, because gradients are enabled.

The memory in tensors at the start of each validation batch grows steadily while gradients are enabled. In your own
loop, where validation often lacks torch.no_grad(), it is enough that validation takes much memory.
"""

from lightning_gpu_tools.advice.causes.memory.memory_growth import kept_in_validation, left
from lightning_gpu_tools.advice.findings import Cause, Findings, new_finding
from lightning_gpu_tools.advice.out_of_memory import MIN_SHARE, ErrorFacts
from lightning_gpu_tools.units import format_bytes


def find(facts: ErrorFacts) -> Findings:
    run, oom = facts
    if not oom.grad_enabled or not facts.in_validation:
        return
    change = "Remove torch.enable_grad() from" if run.has_trainer else "Put torch.no_grad() around"
    advice = f"{change} validation, or detach what it keeps (metric.detach()) and move outputs to the CPU."
    taken = facts.taken_bytes or 0
    kept = kept_in_validation(facts)
    if not kept and not run.has_trainer and taken >= MIN_SHARE * (facts.room_bytes or 0):
        kept = f"Validation takes more than {format_bytes(taken)}"
    if kept:
        why = f"{kept}, with its graph: gradients are enabled in validation.{left(oom.lines)}"
        yield new_finding(why, advice)


CAUSE = Cause(
    says="Each validation batch keeps ..., with its graph; or validation takes ..., with its graph",
    change="`torch.no_grad()` in your own loop, `torch.enable_grad()` removed, or `detach` for what validation keeps",
    find=find,
    verified_on="hardware",
)
