"""evaluation_graph: validation keeps its results with their graph, because gradients are enabled.

The memory in tensors at the start of each validation batch grows steadily while gradients are enabled.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import MemoryCause, Ruling
from lightning_gpu_tools.advice.memory_causes.memory_growth import kept_in_validation
from lightning_gpu_tools.advice.memory_examples import GROWING, an_error
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.phases import VALIDATION
from lightning_gpu_tools.training.run_measurements import RunMeasurements


def find(run: RunMeasurements, oom: OutOfMemory) -> Iterator[Ruling]:
    if oom.grad_enabled:
        change = "Remove torch.enable_grad() from" if run.has_trainer else "Put torch.no_grad() around"
        yield from kept_in_validation(
            oom,
            "with its graph: gradients are enabled in validation.",
            f"{change} validation, or detach what it keeps (metric.detach()) and move outputs to the CPU.",
        )


CAUSE = MemoryCause(
    says="Each validation batch keeps ..., with its graph",
    change="remove `torch.enable_grad()`, or detach what validation keeps",
    find=find,
    after=("other_processes",),
    verified_on="hardware",
    sick=an_error(phase=VALIDATION, validation_begins=GROWING, grad_enabled=True),
    healthy=an_error(phase=VALIDATION, validation_begins=GROWING, grad_enabled=False),
)
