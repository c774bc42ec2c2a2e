"""Plain data exchanged between a dry run and the processes of its command. Sizes are in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_gpu_tools.memory.readings import MemoryLine

# The environment variable with the folder of the dry run, and file names in this folder.
VARIABLE = "LIGHTNING_GPU_TOOLS_DRY_RUN"
PLAN, LOCK, RECORD = "plan.json", "lock", "record-{}.json"


class Moment(NamedTuple):
    """A moment of a run at which memory was allocated."""

    step: int  # starting at 1; 0 = before the first step
    phase: str  # forward, backward, optimizer, or empty
    file: str = ""  # file of the user's innermost line; empty if unknown
    line: int = 0
    function: str = ""


@dataclass(kw_only=True, slots=True)
class ProcessRecord:
    """The record of a process that has imported torch."""

    torch: str  # folder of torch
    # After all requested steps; before that; if it may continue after an error; if the recording failed.
    outcome: Literal["complete", "ended", "running", "broken"] = "running"
    error: str = ""  # that ended the process: "KeyError: 'x'"; empty if there was none or it is unknown
    steps: int = 0  # completed optimizer steps
    world_size: int = 1
    rank: int = 0
    uses_gpu: bool = False  # it started CUDA
    batch_size: int | None = None  # first dimension of the first tensor that the model received; of a list, its length
    peak_allocated_bytes: int = 0  # of tensors, on the GPU where this is highest
    peak_reserved_bytes: int = 0  # that torch took from the driver on that GPU
    retries: int = 0  # allocations there that only succeeded after torch had emptied its cache
    peak: Moment | None = None  # of the memory of tensors
    parts_bytes: Mapping[str, int] = field(default_factory=dict)  # at that time, as in the report's parts_bytes
    lines: tuple[MemoryLine, ...] = ()  # the ten that allocated the most of it, largest first
    failures: int = 0  # of torch's allocator
    failure: Moment | None = None  # the last one
    requested_bytes: int = 0  # size of the failed allocation
    largest_batch: int | None = None  # predicted, on the target GPU; None if unknown
    has_validated: bool = False  # a model in evaluation mode ran without gradients
    has_convolutions: bool = False  # or recurrent layers, which also use cuDNN on a GPU
    compiles: bool = False  # it called torch.compile, which is disabled
    masks: bool = False  # sizes depended on masks, which select everything
    generates: bool = False  # a model generated tokens, up to its maximum length
