"""optimizer: on the CPU, the optimizer takes far longer than forward and backward account for.

Compares the median times of optimizer, forward and backward in steady steps. Only for one rank without a GPU: otherwise
these times include waiting. Reported if an optimizer has a fused implementation, or is not one of torch's.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import Cause
from lightning_gpu_tools.advice.causes.backward import step_parts
from lightning_gpu_tools.advice.examples import cpu_run, parts
from lightning_gpu_tools.advice.findings import FIND_FUNCTION, Evidence, Finding, counted
from lightning_gpu_tools.training.phases import OPTIMIZER
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import printable

# Multiples of forward plus backward. On two cores with torch 2.13, Adam took 0.1 to 1.3 times as long, but 2.4 to
# 3.2 times with batches of one sample or a large embedding; fused=True reduced it to 13 to 25 %.
_MAX = 2.0
_FUSED_SAVES = 0.7


def find(run: RunMeasurements) -> Iterator[Finding]:
    parts = step_parts(run)
    if parts is None or not 0 < (parts.forward_s + parts.backward_s) * _MAX < parts.optimizer_s:
        return
    fusible = [name for name, kind in run.optimizers.items() if kind == "fusible"]
    if not fusible and "own" not in run.optimizers.values():
        return
    share = parts.optimizer_s / parts.step_s
    advice = f"Set {printable(fusible[0])}(..., fused=True)." if fusible else FIND_FUNCTION
    evidence: Evidence = {"ms_per_step": parts.optimizer_s * 1e3, "name": " and ".join(run.optimizers)}
    yield counted("optimizer", share, evidence, advice, avoidable=share * (_FUSED_SAVES if fusible else 1.0))


CAUSE = Cause(
    begins=lambda evidence, has_trainer: f"The optimizer {printable(evidence.get('name') or '')} takes",
    says="The optimizer ... takes ...: on the CPU, far longer than forward and backward account for",
    change="`fused=True`",
    find=find,
    phases=[OPTIMIZER],
    after=("backward",),
    verified_on="cpu",
    sick=cpu_run(parts(2, 4, 14), optimizers={"Adam": "fusible"}),
    healthy=cpu_run(parts(2, 4, 11), optimizers={"Adam": "fusible"}),
)
