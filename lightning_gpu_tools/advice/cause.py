"""The form of a cause. The folders ``causes``, ``memory_causes`` and ``stall_causes`` have a file for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal, NamedTuple

from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.training.run_measurements import RunMeasurements

# Where a training that has a cause was found to have it; "measurements": nowhere yet, only in made-up ones.
Machine = Literal["measurements", "cpu", "simulated GPU", "hardware"]


class Shape(NamedTuple):
    """One way in which a cause shows, as a row of the table in docs/.

    Attributes:
        says: What the report says, in short.
        change: What to change, in short.
        kind: Its ``evidence["kind"]``; empty where there is none.
    """

    says: str
    change: str
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class AnyCause:
    """What is known of a cause of either folder.

    Attributes:
        name: As ``Finding.cause`` has it, and the name of its file.
        shapes: The rows of its table.
        after: Causes that are judged before.
        verified_on: The best machine on which the package found it in a training that has it.
    """

    name: str
    shapes: Sequence[Shape]
    after: Sequence[str] = ()
    verified_on: Machine


@dataclass(frozen=True, kw_only=True)
class Cause(AnyCause):
    """One thing that slows training down. It is silent where one of those that it comes ``after`` has a finding.

    Attributes:
        begins: How *Why* begins, before "... % of the wall time"; by the evidence and ``has_trainer`` where it differs.
        find: Returns its findings; nothing where it costs nothing. ``None`` where ``diagnosis.py`` judges it by what
            the others have found.
        phases: Those of the clock, or groups of them, whose source lines it names; by the evidence where they differ.
        time: What the time of these lines is called.
        needs: What has to be known to judge it, as attributes of ``RunMeasurements``; not ``None``.
        is_remark: It slows a busy GPU down and leaves none idle, so it makes no run ``low``.
        counts_while_busy: It makes a run ``low`` also where the GPU looks busy.
        sick: Measurements that have it, as the first finding.
        healthy: Measurements that resemble them and do not.
    """

    begins: str | Callable[[Mapping[str, float | str], bool], str]
    find: Callable[[RunMeasurements], Iterable[Finding]] | None = None
    phases: Sequence[str] | Callable[[Mapping[str, float | str]], Sequence[str]] = ()
    time: str = "this time"
    needs: Sequence[str] = ()
    is_remark: bool = False
    counts_while_busy: bool = False
    sick: RunMeasurements
    healthy: RunMeasurements


def in_folder(package: str, path: Iterable[str]) -> dict[str, Any]:
    """Return the ``CAUSE`` of each file by its name, each behind those after which it is judged."""
    files = [import_module(f"{package}.{module.name}") for module in iter_modules(path)]
    named = {file.CAUSE.name: file.CAUSE for file in files}
    order = TopologicalSorter({cause.name: cause.after for cause in named.values()}).static_order()
    return {name: named[name] for name in order}
