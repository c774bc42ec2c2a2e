"""unexplained: time outside all measured phases, or a GPU that is idle inside the step for an unknown reason.

Adds the Trainer's own time beyond the usual, and the GPU's idle time inside the step that no other finding explains.
"""

from dataclasses import replace

from lightning_gpu_tools.advice.findings import MAX_UNNAMED, Cause, Finding, Findings, Variant, label_of
from lightning_gpu_tools.advice.lost_time import idle_share, lost_share, lost_time
from lightning_gpu_tools.training.phases import OUTSIDE_LOOP, TRAINER, UNEXPLAINED, base_phase
from lightning_gpu_tools.training.run_measurements import TRAINING_STEP, RunMeasurements
from lightning_gpu_tools.units import format_duration

# Lightning 2.6 takes 0.2 to 0.5 ms of its own around a step, and more with few cores. No setting changes it.
_USUAL_TRAINER_S = 0.001
_NAME_IT = "If it is validation, put it in `with run.phase('validation'):`."


def find(run: RunMeasurements) -> Findings:
    lines = [UNEXPLAINED, OUTSIDE_LOOP, TRAINER]
    # The rest of the step, if its parts are known. GPU time lost in it has its own findings.
    if not run.on_gpu and any(base_phase(phase) == TRAINING_STEP != phase for phase in run.phase_s):
        lines.append(TRAINING_STEP)
    for phase in lines:
        if phase not in run.phase_s:
            continue
        share = min(lost_share(run, phase), idle_share(run))
        found = lost_time(
            run,
            share,
            f'The line "{label_of(phase, run.activity)}" takes',
            _NAME_IT if phase == OUTSIDE_LOOP else "",
            phase=phase,
            has_lines=phase != TRAINING_STEP,  # its forward, backward and optimizer have names
            has_function=True,
            avoidable=share - _usual(run, phase),
        )
        # That this time has no name is sure, even if the GPU's own times contradict the driver's utilization.
        yield replace(found, ceiling_lower=found.ceiling)


def _usual(run: RunMeasurements, phase: str) -> float:
    return _USUAL_TRAINER_S / run.step_s if phase in (TRAINER, TRAINING_STEP) else 0.0


def why_not(run: RunMeasurements, finding: Finding) -> str:
    phase = str(finding.evidence["phase"])
    if finding.share - _usual(run, phase) > MAX_UNNAMED:
        return ""
    if phase in (TRAINER, TRAINING_STEP):
        return f"it is {format_duration(finding.share * run.step_s)} per step, which no setting changes"
    return f"up to {100 * MAX_UNNAMED:.0f}% is usual"


def explain_rest(run: RunMeasurements, idle: float) -> Finding:
    advice = "Profile some steps with torch.profiler."
    if run.has_trainer:
        advice = f"Profile the {run.activity} step: Trainer(profiler='pytorch', fast_dev_run=50)."
    begins = f"Unexplained idle time inside the {run.activity} step takes"
    return lost_time(run, idle, begins, advice, phase=TRAINING_STEP, has_lines=True, lower=0.0)


CAUSE = Cause(
    find=find,
    why_not=why_not,
    leaves_explained=True,
    explain_rest=explain_rest,
    rows=[
        Variant("Unexplained idle time inside the training step", '`Trainer(profiler="pytorch")`'),
        Variant(
            'The line "Trainer overhead", "unexplained", "outside of the loop" takes ...',
            "find the function with `py-spy` or `cProfile`",
        ),
    ],
    kind="busy",
    ignores_min_cost=True,
    verified_on="simulated GPU",
)
