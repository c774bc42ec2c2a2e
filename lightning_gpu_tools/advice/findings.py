"""The types of a cause, a finding and a diagnosis, and what causes share: thresholds, intervals, source lines. Pure."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Generic, Literal, NamedTuple, TypeVar

from lightning_gpu_tools.memory.readings import MemoryLine
from lightning_gpu_tools.training.phases import PHASES, TRAINING_STEP, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements, SourceLine
from lightning_gpu_tools.units import format_bytes, printable

Verdict = Literal["healthy", "low", "too_short", "shared_gpu", "unknown", "out_of_memory"]
Basis = Literal["measured", "heuristic"]
Evidence = dict[str, float | str | None]  # None = unknown

# Our defaults: smaller gains drown in noise.
MIN_CEILING = 1.05
MIN_CEILING_LOWER = 1.02
MIN_UTILIZATION_PERCENT = 70.0  # SageMaker's LowGPUUtilization rule
# Our defaults.
MIN_STEPS = 50  # steady steps before a verdict
MIN_SECONDS = 20.0  # of steady steps, before a warning
AT_END = 0.25  # of MIN_SECONDS, before the verdict on a finished run, which cannot be measured longer
MAX_UNNAMED = 0.10  # our default, of the wall time: from here on, no run is healthy

# Of source lines, our defaults.
MIN_SAMPLES = 20  # of a phase: with 20, a share is known to within 22 points either way (95%), with 200 to within 7
_MIN_SHARE = 0.10  # a line with less is not worth reporting
_MAX_LINES = 3
_MAX_NAME = 100  # characters of a file or a function
# If the innermost line is in one of these, the program has no line to change there.
_FRAMEWORKS = ("torch/", "lightning/", "pytorch_lightning/", "lightning_fabric/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One reason why training is slow or has stalled, or memory is full.

    Attributes:
        cause: Name of the cause: that of a file in ``advice/causes``.
        share: Fraction of the wall time lost to it; 0 for memory. On a GPU, at most the GPU's idle time, except for
            causes that make a busy GPU slower.
        ceiling: Largest possible speedup from removing it: 1.31 = +31%. If more workers are advised, at most the
            upper end of the range predicted for them.
        ceiling_lower: Lower 95% bound of ``ceiling``; equal to it if the share was counted, not sampled.
        evidence: Numbers with the unit in the name, and text. ``"phase"`` is its line of the time tree, and
            ``"kind"`` the subtype of ``data_loading``, ``slowing_down`` and ``cpu_contention``. ``"source_lines"``
            are the program's lines that take most of the time: ``"data.py:41 in decode (62%)"``. For a torch
            DataLoader, ``"speedup"`` is the estimate for ``"predicted_num_workers"`` workers, with a range from
            ``"speedup_lower"`` to ``"speedup_upper"``.
        why: What happens and what it costs, in sentences.
        advice: Exact change to make.
        basis: ``measured``, or ``heuristic`` if it relies on a rule of thumb.
    """

    cause: str
    share: float = 0.0
    ceiling: float = 1.0
    ceiling_lower: float = 1.0
    evidence: Mapping[str, int | float | str] = field(default_factory=dict)
    why: str = ""
    advice: str
    basis: Basis = "measured"


Findings = Iterator[Finding]

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
    verified_on: Machine = "measurements"  # the best machine on which the package found it in a real run

    # Of lost time. "idle" leaves the GPU idle. "busy" makes a run "low" even if the GPU looks busy. A "remark" slows a
    # busy GPU down but leaves none idle, so it makes no run "low". "others": the time is that of other jobs.
    kind: Literal["idle", "busy", "remark", "others"] = "idle"
    # Returns why a finding needs no change, to follow "... takes 38% of the wall time, but"; empty if it does.
    why_not: Callable[[Facts, Finding], str] = lambda facts, finding: ""
    silences: Sequence[str] = ()  # later causes, not judged if this one finds anything, however little
    leaves_explained: bool = False  # its findings on phases of earlier findings are left out
    ignores_min_cost: bool = False  # it is reported however little time it takes per step
    # Whether it can be judged without enough steady steps, of which short epochs and frequent validations leave few.
    is_judged_early: Callable[[Facts], bool] = lambda facts: False
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The verdict on a run, its causes, and what to do.

    Attributes:
        verdict: ``healthy``, ``low`` (the GPU, or without one the training step, is often idle), ``too_short`` to
            judge, ``shared_gpu``, ``unknown`` (nothing reports the GPU's utilization), or ``out_of_memory`` (such an
            error ended the run).
        findings: Causes, highest ceiling first; memory findings come first if memory ran out, otherwise last.
        why: Reason for the verdict, with numbers.
        next_step: What to do now, with numbers.
        utilization_percent: Mean utilization of the trainer's GPUs; ``None`` if nothing reports it.
        gpu_idle_percent: GPU idle time outside validation in percent of the wall time, by the host's phase at that
            time; ``training_step`` is the rest. Empty if the GPU's own times were not measured.
        waiting_share: Fraction of the wall time in which the training thread waited for data; ``None`` if unknown.
        step_p50_s: Median step time after the warm-up, without pauses; ``None`` without such steps.
        step_p95_s: 95th percentile of the same step times; ``None`` without such steps.
    """

    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    why: str
    next_step: str
    utilization_percent: float | None = None
    gpu_idle_percent: Mapping[str, float] = field(default_factory=dict)
    waiting_share: float | None = None
    step_p50_s: float | None = None
    step_p95_s: float | None = None

    def summary(self) -> dict[str, str | float | None]:
        """Return the verdict, the first finding and the speed as a flat dictionary, for tables and loggers.

        ``cause``, ``cause_share`` and ``max_speedup`` are those of the first finding, ``None`` without one.
        """
        first = next(iter(self.findings), None)
        return {
            "verdict": self.verdict,
            "cause": None if first is None else first.cause,
            "cause_share": None if first is None else first.share,
            "max_speedup": None if first is None else first.ceiling,
            "waiting_share": self.waiting_share,
            "step_p50_s": self.step_p50_s,
            "step_p95_s": self.step_p95_s,
        }


def label_of(phase: str, activity: str = "training") -> str:
    """Return the label of the phase's line in the time tree, without its group."""
    group, _, name = phase.partition("/")
    if phase == TRAINING_STEP:
        return f"{activity} step"
    return printable(name) or (PHASES[group].label if group in PHASES else printable(group))


def ceiling(share: float) -> float:
    """Return the largest possible speedup from removing work that takes this share of the wall time."""
    return math.inf if share >= 1 else 1 / (1 - max(0.0, share))


def as_times(speedup: float) -> str:
    """Return a speedup as text, rounded like an estimate: ``"1.9x"``, or ``"1.08x"`` below 1.2."""
    return f"{speedup:.2f}x" if speedup < 1.2 else f"{speedup:.1f}x" if speedup < 10 else f"{speedup:.0f}x"


def gain(finding: Finding) -> str:
    """Return a sentence about the speedup from following the advice."""
    if "advised_num_workers" in finding.evidence:
        ends = (as_times(float(finding.evidence[name])) for name in ("speedup", "speedup_lower", "speedup_upper"))
        return "Speedup: about {} ({} to {}).".format(*ends)
    if finding.cause == "data_loading":
        return f"Without this wait: {as_times(finding.ceiling)}."
    return f"Speedup: up to {finding.ceiling:.3g}x."


def known(evidence: Mapping[str, float | str | None]) -> dict[str, float | str]:
    """Return the evidence without what is unknown."""
    return {name: value for name, value in evidence.items() if value is not None}


def new_finding(why: str, *advice: str, **evidence: float | str | None) -> Finding:
    """Return a finding that costs no time by itself. ``advice`` are sentences; empty ones are left out."""
    return Finding(cause="", why=why, advice=" ".join(filter(None, advice)), evidence=known(evidence))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that holds the median with at least 95% confidence; ``None`` for fewer than six values.

    It spans the k-th smallest to the k-th largest value: n coin tosses show fewer than k heads in at most 2.5%.
    """
    count = len(values)
    rank, ways_below = 0, 1
    while rank < count and 40 * ways_below <= 2**count:
        rank += 1
        ways_below += math.comb(count, rank)
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that holds the mean with about 95% confidence; ``None`` for fewer than six values.

    It uses the bootstrap. Any value is missing from every third draw, so one accident does not move the lower end.
    """
    if len(values) < 6:
        return None
    draw = random.Random(0)
    means = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(1000))
    return means[24], means[974]


def sentence_of(storage: str, subject: str = "") -> str:
    """Return where files are as a sentence after a space; empty if it is unknown."""
    return f" {subject}{printable(storage)}." if storage else ""


# --- source lines that take the time of a phase, by their number of samples -------------------------------------------


def in_words(file: str, line: int, function: str) -> str:
    """Return a line as ``"data.py:41 in decode"``."""
    return f"{printable(file, _MAX_NAME)}:{line} in {printable(function, _MAX_NAME)}"


def is_of_program(file: str) -> bool:
    """Return whether a file belongs to the program, not to a framework."""
    return bool(file) and not file.startswith(_FRAMEWORKS)


def seen_in(lines: Sequence[SourceLine], phase: str) -> list[SourceLine]:
    """Return the lines sampled in this phase, or in phases of this group, most frequent first, without a phase.

    Samples without a line of the user's code count for the framework's line.
    """
    samples: Counter[SourceLine] = Counter()
    for seen in lines:
        if phase in (seen.phase, base_phase(seen.phase)):
            samples[replace(seen, phase="", samples=0)] += seen.samples
    found = [replace(line, samples=count) for line, count in samples.items() if count]
    return sorted(found, key=lambda line: (-line.samples, line.file, line.line, line.function))


def top_lines(lines: Sequence[SourceLine], phase: str, whose: str = "this time") -> tuple[str | None, str]:
    """Return the lines with the largest shares of this phase, and a sentence about the first if it is the program's.

    ``"data.py:41 in decode (62%), data.py:57 in __getitem__ (20%)"``; ``None`` if there are too few samples.
    """
    seen = seen_in(lines, phase)
    whole = sum(line.samples for line in seen)
    top = [line for line in seen if line.samples >= _MIN_SHARE * whole][:_MAX_LINES]
    if whole < MIN_SAMPLES or not top:
        return None, ""
    places = [(in_words(line.file, line.line, line.function), 100 * line.samples / whole) for line in top]
    place, percent = places[0]
    sentence = f"{percent:.0f}% of {whose} is at {place}." if is_of_program(top[0].file) else ""
    return ", ".join(f"{place} ({percent:.0f}%)" for place, percent in places), sentence


def holding(lines: Sequence[MemoryLine]) -> str | None:
    """Return the program's lines that allocated most of the memory in ``lines``, each at least 10% of it.

    ``"net.py:41 in forward (1.20 GiB), net.py:57 in forward (310 MiB)"``; ``None`` without one.
    """
    whole = sum(line.bytes for line in lines)
    named = [line for line in lines if is_of_program(line.file) and line.bytes >= _MIN_SHARE * whole][:_MAX_LINES]
    return ", ".join(f"{in_words(*line[3:])} ({format_bytes(line.bytes)})" for line in named) or None
