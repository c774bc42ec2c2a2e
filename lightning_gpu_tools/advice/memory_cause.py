"""What the package knows of one cause of an out-of-memory error. The folder ``memory_causes`` has a file for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gpu_tools.advice.cause import AnyCause
from lightning_gpu_tools.advice.findings import Evidence, Finding, counted
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.run_measurements import RunMeasurements

MIN_SHARE = 0.10  # our default for the share of the memory from which on something in it can be a cause


class Ruling(NamedTuple):
    """A cause of an error, and the sentence that says why it is one."""

    finding: Finding
    why: str


Rule = Callable[[RunMeasurements, OutOfMemory], Iterable[Ruling]]


@dataclass(frozen=True, kw_only=True)
class MemoryCause(AnyCause):
    """One reason why memory runs out. Where several apply, the verdict is the first one, and the others are told, too.

    Attributes:
        find: Returns its rulings on an error of a GPU's memory; nothing where it is no cause.
        find_on_host: The same of the host's memory; ``None`` where it fills no host.
        is_last_resort: It is judged last, and only where no other cause has a ruling.
        sick: An error that has it, as the first finding, with a training on a GPU.
        healthy: An error that resembles it and does not.
    """

    find: Rule
    find_on_host: Rule | None = None
    is_last_resort: bool = False
    sick: OutOfMemory
    healthy: OutOfMemory


def ruling(oom: OutOfMemory, cause: str, why: str, *advice: str, **evidence: float | str | None) -> Ruling:
    """Return a ruling of which the evidence also has what is known of every error. Empty sentences are left out."""
    reserved, allocated, model = oom.reserved_bytes, oom.allocated_bytes, oom.model
    common: Evidence = {
        "phase": oom.phase,
        "step": oom.step,
        "requested_bytes": oom.message.requested_bytes,
        "free_bytes": oom.free_bytes,
        "total_bytes": oom.total_bytes,
        "allowed_bytes": oom.message.allowed_bytes,
        "allocated_bytes": allocated,
        "cached_bytes": None if reserved is None or allocated is None else reserved - allocated,
        "others_bytes": oom.others_bytes or None,
        "begin_bytes": oom.begin_bytes,
        "parameters_bytes": model.parameters_bytes or None,
        "gradients_bytes": model.gradients_bytes or None,
        "optimizer_bytes": model.optimizer_bytes or None,
    }
    return Ruling(counted(cause, 0.0, {**common, **evidence}, " ".join(filter(None, advice))), why)
