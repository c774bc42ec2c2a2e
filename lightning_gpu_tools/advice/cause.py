"""The types that describe a cause. Each cause has a file in ``causes``, ``memory_causes`` or ``stall_causes``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal, NamedTuple

from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.advice.out_of_memory import OutOfMemory
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.training.stall_facts import StallFacts

# The best machine on which a cause was found in a real run; "measurements": so far only in synthetic measurements.
Machine = Literal["measurements", "cpu", "simulated GPU", "hardware"]

# The settings that advice on loading data, and on a step that needs less memory, may change.
LOADER_SETTINGS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
SMALLER_STEP = ("batch_size", "precision", "accumulate_grad_batches")


class Shape(NamedTuple):
    """One form of a cause, as a row of the table in docs/."""

    says: str  # short form of the text in the report, or the symptom of a stall
    change: str  # short form of the change to make
    kind: str = ""  # its evidence["kind"]; empty if it has none


@dataclass(frozen=True, kw_only=True)
class AnyCause:
    """The fields that all causes share. The name of a cause is that of its file."""

    says: str = ""  # of its form, if it has only one
    change: str = ""  # likewise
    rows: Sequence[Shape] = ()  # its forms, if it has several
    after: Sequence[str] = ()  # causes that are judged earlier
    settings: Sequence[str] = ()  # those in the report's settings that its advice may change
    verified_on: Machine  # the best machine on which the package found it in a real run

    @property
    def shapes(self) -> Sequence[Shape]:
        """Its forms, at least one."""
        return self.rows or [Shape(self.says, self.change)]


@dataclass(frozen=True, kw_only=True)
class Cause(AnyCause):
    """One thing that slows training down. It reports nothing if a cause in ``after`` has a finding."""

    # The beginning of Why, before "... % of the wall time": text, or a function of the evidence and has_trainer.
    begins: str | Callable[[Mapping[str, float | str], bool], str]
    # Returns its findings; none if it costs nothing. None if diagnosis.py derives it from the others.
    find: Callable[[RunMeasurements], Iterable[Finding]] | None = None
    # Returns why one of them needs no change, to follow "... takes 38 % of the wall time, but"; empty if it does.
    why_not: Callable[[RunMeasurements, Finding], str] = lambda run, finding: ""
    # Phases, or groups of them, whose source lines it reports: a sequence, or a function of the evidence.
    phases: Sequence[str] | Callable[[Mapping[str, float | str]], Sequence[str]] = ()
    time: str = "this time"  # words for the time spent in these lines
    needs: Sequence[str] = ()  # attributes of RunMeasurements that must not be None to judge it
    # Whether its share is idle time inside the training step, which then is not unexplained.
    is_in_step: bool | Callable[[Mapping[str, float | str]], bool] = False
    # Its time is that of the phase of its name, which occurs now and then: up to three times may be chance.
    is_of_events: bool = False
    is_remark: bool = False  # it slows a busy GPU down but leaves none idle, so it makes no run "low"
    counts_while_busy: bool = False  # it makes a run "low" even if the GPU looks busy
    sick: RunMeasurements  # their first finding is this cause
    healthy: RunMeasurements  # similar ones without it


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
    sick: OutOfMemory  # an error of a GPU whose first finding is this cause
    healthy: OutOfMemory  # a similar one without it


class Explanation(NamedTuple):
    """The reason why training has stalled."""

    why: str  # in sentences
    next_step: str
    rank: int | None = None  # the rank that the others wait for
    cause: str = ""  # the name of the StallCause that found it


@dataclass(frozen=True, kw_only=True)
class StallCause(AnyCause):
    """One reason why training makes no progress. The first one that applies counts."""

    find: Callable[[StallFacts], Iterable[Explanation]]  # the first one counts; none if this is not the reason
    sick: StallFacts  # stalled for this reason
    healthy: StallFacts  # similar, but stalled for another one


def in_folder(package: str, path: Iterable[str]) -> dict[str, Any]:
    """Return the ``CAUSE`` of each file by the file's name, in the order in which they are judged."""
    found = {module.name: import_module(f"{package}.{module.name}").CAUSE for module in iter_modules(path)}
    order = TopologicalSorter({name: cause.after for name, cause in found.items()}).static_order()
    return {name: found[name] for name in order}
