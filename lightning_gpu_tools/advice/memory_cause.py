"""The type of a cause of an out-of-memory error. The folder ``memory_causes`` has a file for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gpu_tools.advice.cause import AnyCause
from lightning_gpu_tools.advice.findings import Evidence, Finding, counted
from lightning_gpu_tools.advice.lines import holding, in_words
from lightning_gpu_tools.advice.memory_remedies import needed_bytes
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.run_measurements import RunMeasurements

MIN_SHARE = 0.10  # our default: the smallest share of the memory that can be a cause


class Ruling(NamedTuple):
    """A cause of an error, and a sentence with the reason."""

    finding: Finding
    why: str


Rule = Callable[[RunMeasurements, OutOfMemory], Iterable[Ruling]]


@dataclass(frozen=True, kw_only=True)
class MemoryCause(AnyCause):
    """One reason why memory runs out. If several apply, the first is the verdict; the others are also reported.

    Attributes:
        find: Returns its rulings on an out-of-memory error of a GPU; none if it is not a cause.
        find_on_host: The same for an error of the host; ``None`` if this cause does not fill the host's memory.
        is_last_resort: Whether it is judged last, and only if no other cause has a ruling.
    """

    find: Rule
    find_on_host: Rule | None = None
    is_last_resort: bool = False


def ruling(oom: OutOfMemory, cause: str, why: str, *advice: str, **evidence: float | str | None) -> Ruling:
    """Return a ruling whose evidence includes the facts common to all errors. Empty sentences are left out."""
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
        "needed_bytes": None if oom.message.source == "host" else needed_bytes(oom),
        "begin_bytes": oom.begin_bytes,
        "parameters_bytes": model.parameters_bytes or None,
        "gradients_bytes": model.gradients_bytes or None,
        "optimizer_bytes": model.optimizer_bytes or None,
        "asked_at": None if oom.asked is None else in_words(*oom.asked[3:]),
        "source_lines": holding(oom.lines),
    }
    return Ruling(counted(cause, 0.0, {**common, **evidence}, " ".join(filter(None, advice))), why)
