"""The types that describe a cause. Each cause has a file in ``causes``, ``memory_causes`` or ``stall_causes``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal, NamedTuple

from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.training.run_measurements import RunMeasurements

# The best machine on which a cause was found in a real run; "measurements": so far only in synthetic measurements.
Machine = Literal["measurements", "cpu", "simulated GPU", "hardware"]


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
    # Phases, or groups of them, whose source lines it reports: a sequence, or a function of the evidence.
    phases: Sequence[str] | Callable[[Mapping[str, float | str]], Sequence[str]] = ()
    time: str = "this time"  # words for the time spent in these lines
    needs: Sequence[str] = ()  # attributes of RunMeasurements that must not be None to judge it
    is_remark: bool = False  # it slows a busy GPU down but leaves none idle, so it makes no run "low"
    counts_while_busy: bool = False  # it makes a run "low" even if the GPU looks busy


def in_folder(package: str, path: Iterable[str]) -> dict[str, Any]:
    """Return the ``CAUSE`` of each file by the file's name, in the order in which they are judged."""
    found = {module.name: import_module(f"{package}.{module.name}").CAUSE for module in iter_modules(path)}
    order = TopologicalSorter({name: cause.after for name, cause in found.items()}).static_order()
    return {name: found[name] for name in order}
