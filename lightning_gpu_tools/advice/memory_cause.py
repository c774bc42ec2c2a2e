"""The type of a cause of an out-of-memory error. The folder ``memory_causes`` has a file for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gpu_tools.advice.cause import AnyCause
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.run_measurements import RunMeasurements

MIN_SHARE = 0.10  # our default: the smallest share of the memory that can be a cause


class Ruling(NamedTuple):
    """The reason why memory ran out, and what to change."""

    why: str  # in sentences
    advice: Sequence[str]  # sentences; empty ones are left out
    evidence: Mapping[str, float | str | None] = {}  # beyond what is known of every error; None = unknown


Rule = Callable[[RunMeasurements, OutOfMemory], Iterable[Ruling]]


@dataclass(frozen=True, kw_only=True)
class MemoryCause(AnyCause):
    """One reason why memory runs out. If several apply, the first is the verdict; the others are also reported."""

    find: Rule  # returns its rulings on an error of a GPU; none if it is not a cause
    find_on_host: Rule | None = None  # the same for an error of the host; None if it does not fill the host's memory
    is_last_resort: bool = False  # it is judged last, and only if no other cause has a ruling
