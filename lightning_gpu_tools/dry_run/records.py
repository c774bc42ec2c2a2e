"""Plain data exchanged between a dry run and the processes of its command. Sizes are in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_gpu_tools.training.memory_readings import MemoryLine
from lightning_gpu_tools.training.run_measurements import SourceLine

# The environment variable with the folder of the dry run, and file names in this folder.
VARIABLE = "LIGHTNING_GPU_TOOLS_DRY_RUN"
PLAN, LOCK, RECORD = "plan.json", "lock", "record-{}.json"


class Plan(NamedTuple):
    """The settings of a dry run that each process needs."""

    steps: int  # number of steps after which the process ends
    room_bytes: int  # memory for torch on the target GPU


class Moment(NamedTuple):
    """A moment of a training at which memory was allocated."""

    step: int  # starting at 1; 0 = before the first step
    phase: str  # forward, backward, optimizer, or empty
    file: str = ""  # file of the user's innermost line; empty if unknown
    line: int = 0
    function: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRecord:
    """The record of a process that has imported torch.

    Attributes:
        torch: Folder of torch.
        outcome: ``complete`` after all requested steps, ``ended`` before that, ``running`` if it may continue after an
            error, ``broken`` if the recording failed.
        error: Error that ended the process, such as ``"KeyError: 'x'"``; empty if there was none or it is unknown.
        steps: Completed optimizer steps.
        world_size: Number of ranks in the job.
        rank: Rank of the process.
        uses_gpu: Whether it started CUDA.
        batch_size: Size of the first dimension of the first tensor that the model got.
        peak_allocated_bytes: Peak memory of tensors, on the GPU where this is highest.
        peak_reserved_bytes: Peak memory that torch took from the driver on that GPU.
        peak: Time and place of the peak memory of tensors; ``None`` if unknown.
        parts_bytes: Memory at that time, by part as in the report's ``parts_bytes``.
        lines: The ten lines that allocated the most of it, largest first.
        failures: Number of failures of torch's allocator.
        failure: Time and place of the last failure.
        requested_bytes: Size of the failed allocation.
        largest_batch: Predicted largest batch size that fits the target GPU; ``None`` if unknown.
        syncs: Lines at which the last step waited for the GPU, most frequent first.
        has_validated: Whether a model in evaluation mode ran without gradients.
        has_convolutions: Whether a model has convolutions or recurrent layers, which use cuDNN on a GPU.
        compiles: Whether it called ``torch.compile``, which is disabled.
    """

    torch: str
    outcome: Literal["complete", "ended", "running", "broken"]
    error: str = ""
    steps: int = 0
    world_size: int = 1
    rank: int = 0
    uses_gpu: bool = False
    batch_size: int | None = None
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak: Moment | None = None
    parts_bytes: Mapping[str, int] = field(default_factory=dict)
    lines: tuple[MemoryLine, ...] = ()
    failures: int = 0
    failure: Moment | None = None
    requested_bytes: int = 0
    largest_batch: int | None = None
    syncs: tuple[SourceLine, ...] = ()
    has_validated: bool = False
    has_convolutions: bool = False
    compiles: bool = False
