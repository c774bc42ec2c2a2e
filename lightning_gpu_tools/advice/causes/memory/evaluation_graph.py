"""evaluation_graph: validation keeps its results with their graph, because gradients are enabled.

The memory in tensors at the start of each validation batch grows steadily while gradients are enabled. In your own
loop, where validation often lacks torch.no_grad(), it is enough that validation takes much memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.causes.memory.memory_growth import kept_in_validation, left
from lightning_gpu_tools.advice.examples import GROWING, failed
from lightning_gpu_tools.advice.findings import Cause, Finding, new_finding
from lightning_gpu_tools.advice.out_of_memory import MIN_SHARE, MemoryFacts, in_validation, room_bytes, taken_bytes
from lightning_gpu_tools.training.phases import VALIDATION
from lightning_gpu_tools.units import format_bytes


def find(facts: MemoryFacts) -> Iterator[Finding]:
    run, oom = facts
    if not oom.grad_enabled:
        return
    change = "Remove torch.enable_grad() from" if run.has_trainer else "Put torch.no_grad() around"
    advice = f"{change} validation, or detach what it keeps (metric.detach()) and move outputs to the CPU."
    found = list(kept_in_validation(oom, "with its graph: gradients are enabled in validation.", advice))
    taken = taken_bytes(oom) or 0
    if not found and not run.has_trainer and in_validation(oom) and taken >= MIN_SHARE * (room_bytes(oom) or 0):
        why = f"Validation takes more than {format_bytes(taken)}, with its graph: gradients are enabled in it."
        found = [new_finding(f"{why}{left(oom.lines)}", [advice], {"grown_bytes": taken})]
    yield from found


CAUSE = Cause(
    says="Each validation batch keeps ..., with its graph; or validation takes ..., with its graph",
    change="`torch.no_grad()` in your own loop, `torch.enable_grad()` removed, or `detach` for what validation keeps",
    find=find,
    verified_on="hardware",
    sick=failed(phase=VALIDATION, validation_begins=GROWING, grad_enabled=True),
    healthy=failed(phase=VALIDATION, validation_begins=GROWING, grad_enabled=False),
)
