"""A diagnosis in words: why, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.advice.findings import Finding, Verdict
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import printable

_LOST_TO = {
    "data_loading": "Waiting for data",
    "host_to_device_copy": "Handing the batch to the device",
    "device_sync": "Waiting for the GPU's results inside the training step",
    "launch_bound": "Launching many small kernels",
    "small_batch": "A batch that fills only part of the GPU",
    "low_precision": "Computing in 32 bits beside idle tensor cores",
    "callback": "The callback {name}",
    "logging": "The logger {name}",
    "checkpoint": "Writing checkpoints",
    "validation": "Validation",
    "epoch_start": "Starting epochs",
    "communication": "Waiting for other GPUs",
    "straggler": "Waiting for rank {rank}",
    "thermal_throttling": "Heat, which holds the clocks down,",
    "power_cap": "The power limit, which holds the clocks down,",
    "unexplained": "Something inside the training step, not the host's work around it,",
}


def why(run: RunMeasurements, verdict: Verdict, findings: Sequence[Finding]) -> str:
    """Return the reason of the verdict in a sentence with numbers."""
    gpu = "" if run.utilization_percent is None else f"The GPU is busy {run.utilization_percent:.0f} % of the time. "
    if verdict == "shared_gpu":
        return f"{gpu}{findings[0].advice.partition(':')[0]}, so that says nothing of this training."
    if verdict == "unknown":
        return "Nothing reports how busy the GPU is, and nothing on the host holds training up."
    if verdict == "healthy" or not findings:
        return f"{gpu}Nothing on the host holds the training step up."
    first = findings[0]
    name = printable(first.evidence.get("name", ""))
    named = {"rank": "", **first.evidence, "name": name}
    lost_to = _LOST_TO[first.cause].format_map(named)
    if first.cause == "callback" and "." in name:  # of the model: LitModel.on_train_batch_start
        lost_to = f"The hook {name}"
    return f"{gpu}{lost_to} takes {100 * first.share:.0f} % of the wall time{_numbers(first)}."


def _numbers(finding: Finding) -> str:
    evidence = finding.evidence
    if "wait_ms_per_step" in evidence:
        return " ({wait_ms_per_step:.3g} of {step_ms:.3g} ms a steady step)".format_map(evidence)
    if "behind_ms_per_step" in evidence:
        return " ({own_ms_per_step:.3g} ms a step, {median_ms_per_step:.3g} on the median rank)".format_map(evidence)
    if "ms_per_step" in evidence:
        return " ({ms_per_step:.3g} ms a step)".format_map(evidence)
    if "sm_active_percent" in evidence:
        return " ({sm_active_percent:.0f} % of the multiprocessors have work)".format_map(evidence)
    return ""


def next_step(verdict: Verdict, findings: Sequence[Finding]) -> str:
    """Return what to do now in a sentence with numbers."""
    if findings:
        first = findings[0]
        if verdict == "shared_gpu":
            what = first.advice.partition(": ")[2]
            return what[0].upper() + what[1:]
        gain = float(first.evidence.get("predicted_speedup", first.ceiling))
        says = f"{first.advice} Up to {gain:.3g} times as fast."
        return f"Nothing must change. What is left: {says}" if verdict == "healthy" else says
    if verdict == "unknown":
        return "Look at nvidia-smi dmon; on a MIG instance the driver reports no utilization."
    return "Nothing to change."
