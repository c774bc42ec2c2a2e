"""What the package knows of one cause of lost time. The folder ``causes`` has a file for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.training.run_measurements import RunMeasurements

# Where a training that has a cause was found to have it; "measurements": nowhere yet, only in made-up ones.
Machine = Literal["measurements", "cpu", "simulated GPU", "hardware"]


class Shape(NamedTuple):
    """One way in which a cause shows, as a row of the table in docs/low_gpu_utilization.md.

    Attributes:
        says: What the report says, in short.
        change: What to change, in short.
        kind: Its ``evidence["kind"]``; empty where there is none.
    """

    says: str
    change: str
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing that slows training down.

    Attributes:
        name: As ``Finding.cause`` has it, and the name of its file.
        begins: How *Why* begins, before "... % of the wall time"; by the evidence and ``has_trainer`` where it differs.
        shapes: The rows of its table.
        find: Returns its findings; nothing where it costs nothing. ``None`` where ``diagnosis.py`` judges it by what
            the others have found.
        needs: What has to be known to judge it, as attributes of ``RunMeasurements``; not ``None``.
        after: Causes that are judged before; where one of them has a finding, this one is silent.
        is_remark: It slows a busy GPU down and leaves none idle, so it makes no run ``low``.
        counts_while_busy: It makes a run ``low`` also where the GPU looks busy.
        verified_on: The best machine on which the package found it in a training that has it.
        sick: Measurements that have it, as the first finding.
        healthy: Measurements that resemble them and do not.
    """

    name: str
    begins: str | Callable[[Mapping[str, float | str], bool], str]
    shapes: Sequence[Shape]
    find: Callable[[RunMeasurements], Iterable[Finding]] | None = None
    needs: Sequence[str] = ()
    after: Sequence[str] = ()
    is_remark: bool = False
    counts_while_busy: bool = False
    verified_on: Machine
    sick: RunMeasurements
    healthy: RunMeasurements
