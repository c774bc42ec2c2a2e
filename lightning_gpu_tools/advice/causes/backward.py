"""backward: on the CPU, backward takes far longer than forward accounts for.

Compares the median times of forward and backward in steady steps. Only for one rank without a GPU: otherwise both
times include waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from lightning_gpu_tools.advice.cause import Cause
from lightning_gpu_tools.advice.examples import cpu_run, parts
from lightning_gpu_tools.advice.findings import Finding, counted
from lightning_gpu_tools.training.phases import BACKWARD, RANK_WAIT, base_phase
from lightning_gpu_tools.training.run_measurements import RunMeasurements

# Multiples of forward: 2 (Kaplan et al. 2020, section 2.1), 3 with activation checkpointing, more on busy cores.
_USUAL = 3.0
_MAX = 8.0  # our default: a multiple of forward above which backward is a cause


class StepParts(NamedTuple):
    """Median seconds of a steady step."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    step_s: float


def step_parts(run: RunMeasurements) -> StepParts | None:
    """Return the parts of a step, if they can be compared with each other.

    They cannot with several ranks, which wait for each other in backward, or on a GPU, which runs asynchronously.
    """
    if run.on_gpu or not run.optimizers or any(base_phase(phase) == RANK_WAIT for phase in run.phase_s):
        return None
    names = ("forward_s", "backward_s", "optimizer_s", "wall_s")
    return StepParts(*(median(getattr(block, name) / block.steps for block in run.blocks) for name in names))


def find(run: RunMeasurements) -> Iterator[Finding]:
    parts = step_parts(run)
    if parts is None or not 0 < parts.forward_s * _MAX < parts.backward_s:
        return
    advice = (
        f"Backward takes {parts.backward_s / parts.forward_s:.0f} times as long as forward (normally 1 to "
        f"{_USUAL:.0f}). Check gradient hooks, custom autograd functions, and large embeddings (sparse=True, with SGD, "
        "Adagrad or SparseAdam)."
    )
    avoidable = (parts.backward_s - parts.forward_s * _USUAL) / parts.step_s
    evidence = {"ms_per_step": parts.backward_s * 1e3}
    yield counted("backward", parts.backward_s / parts.step_s, evidence, advice, avoidable=avoidable)


CAUSE = Cause(
    begins="Backward takes",
    says="Backward takes ...: on the CPU, far longer than forward accounts for",
    change="check gradient hooks, custom autograd functions, and large embeddings (`sparse=True`)",
    find=find,
    phases=[BACKWARD],
    verified_on="cpu",
    sick=cpu_run(parts(2, 18, 2), optimizers={"Adam": "fusible"}),
    healthy=cpu_run(parts(2, 15, 1), optimizers={"Adam": "fusible"}),
)
