"""Plain data that a process of a dry run leaves behind, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_gpu_tools.training.memory_readings import MemoryLine
from lightning_gpu_tools.training.run_measurements import SourceLine

# For the processes of a command: the variable that has the folder of the dry run, and names in it.
VARIABLE = "LIGHTNING_GPU_TOOLS_DRY_RUN"
PLAN, LOCK, RECORD = "plan.json", "lock", "record-{}.json"


class Plan(NamedTuple):
    """The part of a dry run's settings that each process needs."""

    steps: int  # after which it ends
    room_bytes: int  # that torch can have on the target GPU


class Moment(NamedTuple):
    """A moment of a training at which memory was allocated."""

    step: int  # starting at 1; 0 = before the first
    phase: str  # forward, backward, optimizer, or empty
    file: str = ""  # the user's innermost line; empty if unknown
    line: int = 0
    function: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRecord:
    """A process that has imported torch.

    Attributes:
        torch: Folder of its torch.
        outcome: ``complete`` after all steps that were asked for, ``ended`` before them, ``running`` while it may go on
            after an error, ``broken`` if it could not be recorded.
        error: What ended it, such as ``"KeyError: 'x'"``; empty if nothing is known.
        steps: Steps of its optimizer.
        world_size: Number of ranks in its job.
        rank: Its own rank.
        uses_gpu: Whether it started CUDA.
        batch_size: Size of the first dimension of the first tensor that the model got.
        peak_allocated_bytes: Most memory in tensors, on the GPU where this is most.
        peak_reserved_bytes: Most memory that torch took from the driver there.
        peak: When and where memory in tensors was most; ``None`` if unknown.
        parts_bytes: What memory was used for at that moment, by the names of the report's ``parts_bytes``.
        lines: The ten lines that allocated most of it, largest first.
        failures: How many times torch's allocator failed.
        failure: When and where it last failed.
        requested_bytes: What it was asked for then.
        largest_batch: The largest batch size that fits the target GPU, predicted; ``None`` if unknown.
        syncs: Lines at which the last step waited for the GPU, most frequent first.
        has_validated: Whether a model in evaluation mode ran without gradients.
        has_convolutions: Whether a model has convolutions or recurrent layers, which use cuDNN on a GPU.
        compiles: Whether it called ``torch.compile``, which is off.
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
