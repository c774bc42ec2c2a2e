"""backward: on the CPU, backward takes far longer than forward accounts for.

Compares the median times of forward and backward in steady steps. Only for one rank without a GPU: otherwise both
times include waiting.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import Cause
from lightning_gpu_tools.advice.findings import Finding, counted
from lightning_gpu_tools.advice.step_parts import step_parts
from lightning_gpu_tools.training.phases import BACKWARD
from lightning_gpu_tools.training.run_measurements import RunMeasurements

# Multiples of forward: 2 (Kaplan et al. 2020, section 2.1), 3 with activation checkpointing, more on busy cores.
_USUAL = 3.0
_MAX = 8.0  # our default: a multiple of forward above which backward is a cause


def find(run: RunMeasurements) -> Iterator[Finding]:
    parts = step_parts(run)
    if parts is None or not 0 < parts.forward_s * _MAX < parts.backward_s:
        return
    advice = (
        f"Backward takes {parts.backward_s / parts.forward_s:.0f} times as long as forward (normally 1 to "
        f"{_USUAL:.0f}). Check gradient hooks, custom autograd functions, and large embeddings (sparse=True)."
    )
    avoidable = (parts.backward_s - parts.forward_s * _USUAL) / parts.step_s
    evidence = {"ms_per_step": parts.backward_s * 1e3}
    yield counted("backward", parts.backward_s / parts.step_s, evidence, advice, avoidable=avoidable)


CAUSE = Cause(
    name="backward",
    begins="Backward takes",
    says="Backward takes ...: on the CPU, far longer than forward accounts for",
    change="check gradient hooks, custom autograd functions, and large embeddings (`sparse=True`)",
    find=find,
    phases=[BACKWARD],
    verified_on="cpu",
)
