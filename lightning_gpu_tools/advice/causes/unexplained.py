"""unexplained: time outside all measured phases, or a GPU that is idle inside the step for an unknown reason.

Adds the Trainer's own time beyond the usual, and the GPU's idle time inside the step that no other finding explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_gpu_tools.advice.cause import Cause, Shape
from lightning_gpu_tools.advice.examples import STEP, cpu_run, gpu_run
from lightning_gpu_tools.advice.findings import FIND_FUNCTION, Evidence, Finding, counted
from lightning_gpu_tools.advice.host_phases import seconds_of
from lightning_gpu_tools.training.phases import OUTSIDE_LOOP, TRAINER, UNEXPLAINED, base_phase
from lightning_gpu_tools.training.run_measurements import TRAINING_STEP, RunMeasurements
from lightning_gpu_tools.units import format_duration

MAX_UNNAMED = 0.10  # our default, of the wall time: from here on, no run is healthy
MIN_IDLE = 0.15  # our default, of the wall time: idle in the step beyond what other findings explain
# Lightning 2.6 takes 0.2 to 0.5 ms of its own around a step, and more with few cores. No setting changes it.
_USUAL_TRAINER_S = 0.001
_FEW_STEPS = {
    "fit": "max_steps",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}
_NAME_IT = "If it is validation, put it in `with run.phase('validation'):`. "
_LINES = {
    TRAINER: "The Trainer's own work takes",
    TRAINING_STEP: "Work in the training step other than forward, backward and optimizer takes",
    OUTSIDE_LOOP: "Code outside of run.batches() takes",
    UNEXPLAINED: "Work outside of all hooks and steps takes",
}


def long_lines(run: RunMeasurements) -> list[Finding]:
    """Return a finding for each line of the time tree that has no name of its own."""
    lines = [UNEXPLAINED, OUTSIDE_LOOP, TRAINER]
    # The rest of the step, if its parts are known. GPU time lost in it has its own findings.
    if not run.on_gpu and any(base_phase(phase) == TRAINING_STEP != phase for phase in run.phase_s):
        lines.append(TRAINING_STEP)
    shares = {phase: min(run.lost_share(phase), run.idle_share) for phase in lines if phase in run.phase_s}
    return [
        counted(
            "unexplained",
            share,
            {"phase": phase, **seconds_of(run, run.phase_s[phase])},
            (_NAME_IT if phase == OUTSIDE_LOOP else "") + FIND_FUNCTION,
            avoidable=share - _usual(run, phase),
        )
        for phase, share in shares.items()
    ]


def _usual(run: RunMeasurements, phase: str) -> float:
    return _USUAL_TRAINER_S / run.step_s if phase in (TRAINER, TRAINING_STEP) else 0.0


def why_not(run: RunMeasurements, finding: Finding) -> str:
    """Return why a line without a name needs no change; empty if it does."""
    phase = str(finding.evidence["phase"])
    if "idle_percent" in finding.evidence or finding.share - _usual(run, phase) > MAX_UNNAMED:
        return ""
    if phase in (TRAINER, TRAINING_STEP):
        return f"it is {format_duration(finding.share * run.step_s)} per step, which no setting changes"
    return f"up to {100 * MAX_UNNAMED:.0f} % is usual"


def idle_in_step(run: RunMeasurements, idle: float) -> Finding:
    """Return the finding that the GPU is idle inside the training step for this share of the wall time."""
    if run.has_trainer:
        some = f"{_FEW_STEPS[run.stage]}=50"
        advice = f"Profile the {run.activity} step: Trainer(profiler='pytorch', {some})."
    else:
        advice = "Profile some steps with torch.profiler."
    evidence: Evidence = {"phase": TRAINING_STEP, "idle_percent": 100 * idle}
    return replace(counted("unexplained", idle, evidence, advice), ceiling_lower=1.0)


def _begins(evidence: Mapping[str, float | str], has_trainer: bool) -> str:
    if "idle_percent" in evidence:
        return "Unexplained idle time inside the training step takes"
    return _LINES[str(evidence["phase"])]


def _phases(evidence: Mapping[str, float | str]) -> Sequence[str]:
    # Without forward, backward and optimizer, which have names.
    is_rest_of_step = evidence["phase"] == TRAINING_STEP and "idle_percent" not in evidence
    return [] if is_rest_of_step else [str(evidence["phase"])]


CAUSE = Cause(
    begins=_begins,
    why_not=why_not,
    rows=[
        Shape("Unexplained idle time inside the training step", '`Trainer(profiler="pytorch")`'),
        Shape(
            "The Trainer's own work, or work outside of all hooks and steps, takes ...",
            "find the function with `py-spy` or `cProfile`",
        ),
    ],
    phases=_phases,
    counts_while_busy=True,
    verified_on="simulated GPU",
    sick=gpu_run(STEP, 40.0),
    healthy=cpu_run({"unexplained": 3, **STEP}),
)
