"""slow_steps: a few steps take much longer than the rest, or the first steps do.

Finds steps that take twice the median, and first steps that are as slow, with the line of the report in which they lose
that time. On a GPU, only time during which the GPU was idle counts. Slow steps due to another cause become evidence of
that cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_gpu_tools.advice.cause import Cause, Shape
from lightning_gpu_tools.advice.examples import cpu_run
from lightning_gpu_tools.advice.findings import Basis, Finding, counted
from lightning_gpu_tools.advice.storage import described, evidence_of, may_be_remote
from lightning_gpu_tools.advice.uneven_steps import ACCUMULATION, Uneven, details, lost, quoted, rounded, uneven
from lightning_gpu_tools.advice.workers_allowed import workers_allowed
from lightning_gpu_tools.training.phases import (
    DATA_LOADING,
    PAUSES,
    RANK_WAIT,
    SLOW_STEP,
    TRAINER,
    TRAINING_STEP,
    UNEXPLAINED,
    base_phase,
)
from lightning_gpu_tools.training.run_measurements import RunMeasurements, SlowSteps, StepTimes

# Our defaults.
_NEARLY_ALL = 0.90  # of the waiting
# If four workers are too few, every fourth step waits for the time of four steps. Waits twice as long have another
# reason. They replace the steady wait if they are at least half of all waiting.
_LONGER_THAN_BURSTS = 2.0
_MOST = 0.5
# Slow steps in these phases have no other finding.
_OWN = (TRAINING_STEP, TRAINER, UNEXPLAINED)


def revised(run: RunMeasurements, found: Sequence[Finding]) -> list[Finding]:
    """Return the findings with uneven steps added, each to the finding of its cause or as one of its own."""
    findings = list(found)
    for one in uneven(run):
        if not one.lasting or one.evidence.get("period") in ACCUMULATION.values():
            continue  # the optimizer's step is due then
        place = next((i for i, finding in enumerate(findings) if _is_about(finding, one)), None)
        before = None if place is None else findings.pop(place)
        group = base_phase(one.phase)
        if group == DATA_LOADING:
            after = _waits(run, one, before)
        elif before is not None:
            after = replace(before, evidence={**one.evidence, **before.evidence})
        else:
            after = _slow_work(one) if group in _OWN else None
        findings += [] if after is None else [after]
    return findings


def not_in_findings(run: RunMeasurements, findings: Sequence[Finding]) -> str:
    """Return a phrase about the most uneven phase that no finding covers; empty if there is none."""
    for one in uneven(run):
        if one.phase not in PAUSES and not any(_is_about(finding, one) for finding in findings):
            return f"{details({**one.evidence, 'phase': one.phase})}: {100 * one.share:.0f} % of the wall time"
    return ""


def _is_about(finding: Finding, one: Uneven) -> bool:
    if finding.cause == "slow_steps":
        return finding.evidence["phase"] == one.phase
    group, _, name = one.phase.partition("/")
    if finding.cause == "slowing_down":
        return base_phase(str(finding.evidence["phase"])) == group
    if finding.cause == "recompilation":
        return group == TRAINING_STEP and finding.share >= _MOST * one.share
    if finding.cause in ("straggler", "communication"):
        return group in (RANK_WAIT, *_OWN)  # where ranks wait for one another
    if group == TRAINING_STEP:
        return finding.cause == name  # backward, optimizer
    return finding.cause == group and (not name or finding.evidence.get("name", name) == name)


def _slow_work(one: Uneven) -> Finding:
    evidence, where = one.evidence, quoted(one.phase)
    basis: Basis = "measured"
    if "first_steps" in evidence:
        kind = "beginning"
        basis = "heuristic"
        advice = (
            "Longer runs lose less. Pad batches to a few lengths: torch.compile and cuDNN start over for each length."
        )
    elif "batch_items_times" in evidence:
        kind = "longer_batches"
        basis = "heuristic"
        advice = (
            f"Slow steps have {rounded(evidence['batch_items_times'])} times as many elements per batch. Put samples "
            "of similar length into one batch, or limit its tokens."
        )
    elif "every_steps" in evidence:
        kind = "periodic"
        advice = (
            f"Find what runs every {evidence['every_steps']} steps in {where}. Run it less often, or make it faster."
        )
    else:
        kind = "irregular"
        advice = (
            f"Find what the slow steps have in common in {where}; the latest are {evidence['latest_steps']}. Possible "
            "reasons: unusual samples, a full disk, other programs, or a slow rank."
        )
    return counted("slow_steps", one.share, {"kind": kind, "phase": one.phase, **evidence}, advice, basis)


def _waits(run: RunMeasurements, one: Uneven, steady: Finding | None) -> Finding | None:
    """Return the finding on waiting for data; of another kind if most waits are few long ones or at the beginning."""
    evidence, workers, times = one.evidence, 0 if run.loader is None else run.loader.num_workers, run.step_times
    begins = "first_steps" in evidence
    if begins:
        is_all = float(evidence["first_percent"]) >= 100 * _NEARLY_ALL
    else:
        assert times is not None
        burst = _LONGER_THAN_BURSTS * max(1, workers) * times.seconds / times.count / max(times.p50_s, 1e-9)
        if float(evidence["times_median"]) <= burst:
            return steady
        is_all = one.share >= _MOST * lost(run, DATA_LOADING, run.phase_s[DATA_LOADING] / run.wall_s)
    if steady is not None and (not is_all or steady.evidence.get("kind") in ("slow_worker", "cold_cache")):
        return replace(steady, evidence={**evidence, **steady.evidence})
    if begins:
        kind = "cold_cache"
        is_memory = run.storage is not None and run.storage.is_memory
        cached = "" if is_memory else ": by then the data is cached"
        advice = f"Later steps need no change{cached}.{described(run.storage)}"
        if may_be_remote(run.storage):
            advice += " To speed up the beginning, copy the data to a local disk before training."
    else:
        kind = "slow_batches"
        advice = (
            f"Some batches take as long to load as {rounded(evidence['times_median'])} steps, the latest at steps "
            f"{evidence['latest_steps']}. Find out what the dataset does for them"
        )
        can_prefetch = workers or not workers_allowed(run.loader_began).obstacles
        advice += ", or prefetch more batches than that (num_workers times prefetch_factor)." if can_prefetch else "."
    shown = {"kind": kind, "num_workers": workers, **evidence, **evidence_of(run.storage)}
    return counted("data_loading", one.share, shown, advice, "heuristic" if begins else "measured")


def _phases(evidence: Mapping[str, float | str]) -> Sequence[str]:
    # In a slow beginning, and with longer batches, slow steps spend their time in the same line as other steps.
    return [f"{SLOW_STEP}/{evidence['phase']}"] if evidence["kind"] in ("periodic", "irregular") else []


def _with_slow_steps(times: float) -> RunMeasurements:
    """Return 250 steps of 40 ms; every 50th takes ``times`` as long."""
    steps = (50, 100, 150, 200, 250)
    excess_s = len(steps) * (times - 1) * 0.04
    slow = SlowSteps(
        phase=TRAINING_STEP, count=len(steps), seconds=len(steps) * times * 0.04, excess_s=excess_s, steps=steps
    )
    facts = StepTimes(count=230, seconds=9.2 + excess_s, p50_s=0.04, p95_s=0.04, max_s=times * 0.04, slow=(slow,))
    run = cpu_run({"training_step": 40.0})
    wall_s = run.wall_s + excess_s
    return replace(run, wall_s=wall_s, phase_s={"training_step": wall_s}, step_times=facts)


CAUSE = Cause(
    begins="Slow steps take",
    rows=[
        Shape(
            "Slow steps take ...: how many, how often, and in which line of the tree",
            "find what runs at that period",
            "periodic",
        ),
        Shape(
            "Slow steps take ...: how many, and in which line of the tree",
            "find what these steps have in common",
            "irregular",
        ),
        Shape(
            "Slow steps have ... times as many elements per batch",
            "group samples of similar length, or limit the tokens of a batch",
            "longer_batches",
        ),
        Shape(
            "In the first ... steps, ... took ... times as long",
            "no change if torch is compiling; otherwise use only a few batch shapes",
            "beginning",
        ),
    ],
    phases=_phases,
    time="the extra time",
    is_in_step=True,
    verified_on="cpu",
    sick=_with_slow_steps(15.0),
    healthy=_with_slow_steps(3.0),
)
