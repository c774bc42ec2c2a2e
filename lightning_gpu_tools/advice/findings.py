"""What a diagnosis consists of, and what a finding must be worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["healthy", "low", "too_short", "shared_gpu", "unknown"]
Cause = Literal[
    "data_loading",
    "host_to_device_copy",
    "device_sync",
    "launch_bound",
    "small_batch",
    "low_precision",
    "callback",
    "logging",
    "checkpoint",
    "validation",
    "epoch_start",
    "communication",
    "straggler",
    "thermal_throttling",
    "power_cap",
    "shared_gpu",
    "unexplained",
]

# A choice: advice is given where removing a cause could gain at least 5 %, and with 95 % confidence more than 2 %.
# Less than that cannot be told from the noise between two runs.
MIN_CEILING = 1.05
MIN_CEILING_LOWER = 1.02
# A choice: a cause must cost this much of a step. Below it lies what no setting removes, such as the time a DataLoader
# takes to hand over a batch that is ready.
MIN_COST_S_PER_STEP = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that holds training up.

    Attributes:
        cause: What it is.
        share: Fraction of the wall time lost to it, 0 to 1; on a GPU never more than the GPU's idle time.
        ceiling: The most that removing it can speed training up: 1.31 = +31 %.
        ceiling_lower: Lower 95 % bound of ``ceiling``; equal to it where the share is a full count and no sample.
        evidence: Numbers with the unit in the name, and words; ``"kind"`` says which kind of ``data_loading`` it is.
        advice: The exact change.
        basis: ``measured``, or ``heuristic`` where a rule of thumb was needed.
    """

    cause: Cause
    share: float
    ceiling: float
    ceiling_lower: float
    evidence: Mapping[str, float | str]
    advice: str
    basis: Literal["measured", "heuristic"] = "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What a run's measurements say.

    Attributes:
        verdict: ``healthy``, ``low`` (the GPU, or without one the training step, stands waiting), ``too_short`` to
            judge, ``shared_gpu``, or ``unknown`` (nothing reports the GPU's utilization).
        findings: Ordered by ceiling, highest first.
        why: The verdict's reason in one sentence with numbers.
        next_step: What to do now, in one sentence with numbers.
        utilization_percent: Mean utilization of the trainer's GPUs, ``None`` without a report of it.
        gpu_idle_percent: Where the GPU stood idle, in percent of the wall time outside of validation, by the phase of
            the host in which it did; ``training_step`` is what remains inside of it. Empty where the GPU's own times
            were not measured.
        gpu_idle_residual_percent: By how much these parts exceed what the driver counts as idle: 0 if they add up.
    """

    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    why: str
    next_step: str
    utilization_percent: float | None = None
    gpu_idle_percent: Mapping[str, float] = field(default_factory=dict)
    gpu_idle_residual_percent: float = 0.0


def ceiling(share: float) -> float:
    """Return how much faster training is at most without something that takes this share of the wall time."""
    return math.inf if share >= 1 else 1 / (1 - max(0.0, share))


def counted(
    cause: Cause,
    share: float,
    evidence: Mapping[str, float | str],
    advice: str,
    basis: Literal["measured", "heuristic"] = "measured",
) -> Finding:
    """Return a finding whose share is no sample of steps, so that its ceiling is its own lower bound."""
    most = ceiling(share)
    return Finding(
        cause=cause, share=share, ceiling=most, ceiling_lower=most, evidence=evidence, advice=advice, basis=basis
    )


def is_worth_saying(finding: Finding, step_s: float) -> bool:
    """Return whether a finding's gain and its cost stand out.

    Args:
        finding: What was found.
        step_s: Wall time of training for each step, in seconds.
    """
    return (
        finding.ceiling >= MIN_CEILING
        and finding.ceiling_lower > MIN_CEILING_LOWER
        and finding.share * step_s >= MIN_COST_S_PER_STEP
    )
