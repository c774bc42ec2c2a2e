"""The types of a diagnosis, the thresholds that rules share, and confidence intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final, Literal

from lightning_gpu_tools.advice.idle_time import idle_residual
from lightning_gpu_tools.advice.lines import top_line_sentence, top_source_lines
from lightning_gpu_tools.training.dataset import Storage
from lightning_gpu_tools.training.phases import PHASES, TRAINING_STEP, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_duration, printable, printable_path

SHARED_GPU: Final = "shared_gpu"  # a verdict; a cause has the same name
Verdict = Literal["healthy", "low", "too_short", "shared_gpu", "unknown", "out_of_memory"]
Basis = Literal["measured", "heuristic"]
Evidence = dict[str, float | str | None]  # None = unknown

# Our defaults: smaller gains drown in noise, and no setting removes shorter times, such as handing over a ready batch.
MIN_CEILING = 1.05
MIN_CEILING_LOWER = 1.02
MIN_COST_S_PER_STEP = 0.001
MIN_UTILIZATION_PERCENT = 70.0  # SageMaker's LowGPUUtilization rule
# Our defaults.
MIN_STEPS = 50  # steady steps before a verdict
MIN_SECONDS = 20.0  # of steady steps, before a warning
AT_END = 0.25  # of MIN_SECONDS, before the verdict on a finished run, which cannot be measured longer
MAX_UNNAMED = 0.10  # our default, of the wall time: from here on, no run is healthy
FIND_FUNCTION = (
    "Find the slow function: py-spy record --pid PID --duration 30, or python -m cProfile -s tottime SCRIPT."
)


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
            are the program's lines that take most of the time: ``"data.py:41 in decode (62%)"``. ``"storage_path"``
            is where the data or the checkpoints are, and ``"file_system"`` its type: ``"nfs4"``. For a torch
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


def new_finding(why: str, advice: Sequence[str], evidence: Mapping[str, float | str | None] = {}) -> Finding:
    """Return a finding that costs no time by itself. ``advice`` has sentences; empty ones are left out."""
    return Finding(cause="", why=why, advice=" ".join(filter(None, advice)), evidence=known(evidence))


def lost_time(
    run: RunMeasurements,
    share: float,
    *,
    begins: str,
    advice: str,
    evidence: Mapping[str, float | str | None],
    phase: str | None = None,
    per_step_s: float | None = None,
    detail: str = "",
    lines: Sequence[str] = (),
    whose: str = "this time",
    has_function: bool = False,
    basis: Basis = "measured",
    avoidable: float | None = None,
    lower: float | None = None,
) -> Finding:
    """Return a finding on this share of the wall time.

    ``begins`` is the beginning of the reason, before "...% of the wall time", and ``detail`` more numbers after it,
    by default the seconds per step. ``lines`` are phases, or groups of them, whose source lines it reports; ``whose``
    names their time, and ``has_function`` says to look for a function if no line is known. ``avoidable`` is the
    removable part of the share, by default all, and ``lower`` its lower bound if it was sampled or may be due to
    chance.
    """
    if per_step_s is not None:
        evidence = {**evidence, "ms_per_step": 1e3 * per_step_s}
        detail = detail or f"{format_duration(per_step_s)} per step"
    if lines:
        evidence = {**evidence, "source_lines": top_source_lines(run.lines, *lines)}
    hint = top_line_sentence(run.lines, *lines, whose=whose) or (FIND_FUNCTION if has_function else "")
    bound = ceiling(share if avoidable is None else avoidable)
    # If the GPU's times contradict the driver's utilization, the share may be too large by the difference.
    surely = (share if lower is None else lower) - idle_residual(run)
    return Finding(
        cause="",
        share=share,
        ceiling=bound,
        ceiling_lower=min(bound, ceiling(surely)),
        evidence=known({"phase": phase, **evidence}),
        why=f"{begins} {100 * share:.0f}% of the wall time{detail and f' ({detail})'}.",
        advice=f"{advice} {hint}".strip(),
        basis=basis,
    )


def without_added_time(finding: Finding, slower: Finding) -> Finding:
    """Return a finding without the time added by a slowdown, if both are about the same phase."""
    phase = str(slower.evidence["phase"])
    if finding.evidence.get("phase") not in (phase, base_phase(phase)):
        return finding
    share = max(0.0, finding.share - slower.share)
    return replace(
        finding,
        share=share,
        ceiling=min(finding.ceiling, ceiling(share)),
        ceiling_lower=min(finding.ceiling_lower, ceiling(share)),
        why=f"{finding.why} Excluding the time added by the slowdown, it is {100 * share:.0f}%.",
    )


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


def storage_sentence(storage: Storage | None, subject: str = "") -> str:
    """Return a sentence after a space: ``" /data is on nfs4, a network file system."``; empty if it is unknown."""
    if storage is None:
        return ""
    kind = ", a network file system" if storage.is_network else ", which is memory" if storage.is_memory else ""
    return f" {subject}{printable_path(storage.path)} is on {printable(storage.file_system)}{kind}."


def may_be_remote(storage: Storage | None) -> bool:
    """Return whether a copy on a local disk may be faster."""
    return storage is None or storage.is_network


def evidence_of_storage(storage: Storage | None) -> Evidence:
    """Return a storage as evidence."""
    if storage is None:
        return {}
    return {"storage_path": printable_path(storage.path), "file_system": printable(storage.file_system)}
