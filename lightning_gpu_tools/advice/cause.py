"""The type of a cause. Each cause has a file below ``causes``, and a place in the order of ``causes/__init__.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.advice.loader_plan import LoaderResult
from lightning_gpu_tools.training.run_measurements import RunMeasurements

# The best machine on which a cause was found in a real run; "measurements": so far only in synthetic measurements.
Machine = Literal["measurements", "cpu", "simulated GPU", "hardware"]

# The settings that advice on loading data, and on a step that needs less memory, may change.
LOADER_SETTINGS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
SMALLER_STEP = ("batch_size", "precision", "accumulate_grad_batches")

Facts = TypeVar("Facts")


class Variant(NamedTuple):
    """One variant of a cause: a row of the table in docs/."""

    says: str  # short form of the text in the report, or the symptom of a stall
    change: str  # short form of the change to make
    kind: str = ""  # its evidence["kind"]; empty if it has none


@dataclass(frozen=True, kw_only=True)
class Cause(Generic[Facts]):
    """One thing that slows training down, fills the memory, or stops training. Its name is that of its file."""

    find: Callable[[Facts], Iterable[Finding]]  # its findings, without its name; none if it does not apply
    says: str = ""  # text of a cause with a single variant, as in Variant
    change: str = ""  # change of a cause with a single variant, as in Variant
    rows: Sequence[Variant] = ()  # its variants, if it has several
    settings: Sequence[str] = ()  # those in the report's settings that its advice may change
    verified_on: Machine  # the best machine on which the package found it in a real run
    sick: Facts  # their first finding is this cause
    healthy: Facts  # similar ones without it

    # Of lost time. "idle" leaves the GPU idle. "busy" makes a run "low" even if the GPU looks busy. A "remark" slows a
    # busy GPU down but leaves none idle, so it makes no run "low". "others": the time is that of other jobs.
    kind: Literal["idle", "busy", "remark", "others"] = "idle"
    needs: Sequence[str] = ()  # attributes of RunMeasurements that must not be None to judge it
    # Returns why a finding needs no change, to follow "... takes 38% of the wall time, but"; empty if it does.
    why_not: Callable[[Facts, Finding], str] = lambda facts, finding: ""
    silenced_by: Sequence[str] = ()  # causes: if one of them finds anything, however little, this one is not judged
    explains: Sequence[str] = ()  # groups of phases whose slow steps its findings explain
    # Returns whether a finding is explained by those before it, each with its cause.
    is_explained_by: Callable[[Finding, Sequence[tuple[Cause[Any], Finding]]], bool] = lambda finding, others: False
    takes_over: bool = False  # its time is taken out of later findings on the same phase
    is_in_step: bool = False  # its time in the training step is not unexplained idle time there
    ignores_min_cost: bool = False  # it is reported however little time it takes per step
    # Whether it can be judged without enough steady steps, of which short epochs and frequent validations leave few.
    is_judged_early: Callable[[Facts], bool] = lambda facts: False
    find_searched: Callable[[Facts, LoaderResult], Iterable[Finding]] | None = None  # after a search for settings
    # Returns a finding on idle time in the training step, as a share of the wall time, that no other finding explains.
    explain_rest: Callable[[Facts, float], Finding] | None = None

    # Of out-of-memory errors.
    is_on_host: bool = False  # it is also judged if the memory of the host was full
    is_last_resort: bool = False  # it is judged only if no other cause is found
    find_early: Callable[[RunMeasurements], Iterable[Finding]] | None = None  # its findings before memory is full

    @property
    def variants(self) -> Sequence[Variant]:
        """Its variants, at least one."""
        return self.rows or [Variant(self.says, self.change)]


def is_known(run: RunMeasurements, name: str) -> bool:
    """Return whether an attribute, or one of a part such as ``"gpu.name"``, was measured."""
    first, _, rest = name.partition(".")
    value = getattr(run, first)
    return value is not None and (not rest or attrgetter(rest)(value) is not None)
