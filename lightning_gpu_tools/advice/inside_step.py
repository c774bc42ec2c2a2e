"""What leaves the GPU idle, or half used, inside the training step: copies, waits for its results, small kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_gpu_tools.advice.batch_memory import larger_batch_advice
from lightning_gpu_tools.advice.findings import Finding, counted
from lightning_gpu_tools.training.run_measurements import COPY, RunMeasurements

# A copy or a wait is worth a word from 5 % of the step on, as the DataLoader is to torch's TensorBoard plugin.
_MIN_SHARE = 0.05
# A choice: idle time inside the step is called launch-bound from 15 % on; kernels of a well-fed GPU leave some gaps.
_MIN_LAUNCH_SHARE = 0.15
# Launching a kernel takes the host 5 to 10 us; with kernels shorter than twice that the host cannot keep ahead.
_SHORT_KERNEL_US = 20.0
# A choice: steps shorter than this belong to a model too small for a GPU.
_TINY_STEP_S = 0.005
# DCGM's guide: SM activity below 50 % "likely" is ineffective use of the GPU, however busy it looks.
_FEW_SMS_PERCENT = 50.0
# A choice: a GPU that has a kernel to run for this much of the time looks well used.
_BUSY_PERCENT = 80.0
# torch's TensorBoard plugin: tensor cores at 0 %, on hardware that has them (compute capability 7.0 and later). A
# choice: below 1 % counts as that.
_NO_TENSOR_CORES_PERCENT = 1.0
# bfloat16 and TF32 in hardware: Ampere.
_AMPERE = (8, 0)
_VOLTA = (7, 0)
# A choice: 16-bit numbers are counted as halving the kernels' time. That is what half the bytes bring where memory is
# the limit; matrix products can gain more, and other kernels less.
_HALF_PRECISION_SPEEDUP = 2.0
# torch's TensorBoard plugin: communication beyond 10 % of the step.
_MIN_COMMUNICATION = 0.10


def inside_step(run: RunMeasurements) -> list[Finding]:
    """Return the causes of the GPU's idle time inside the step, without those that the measurements cannot tell."""
    if not run.on_gpu:
        return []
    found = [_copy(run), _sync(run), _launch(run), _small_batch(run), _communication(run)]
    return [finding for finding in found if finding is not None]


def is_tiny(run: RunMeasurements) -> bool:
    """Return whether the model is too small for a GPU to make a difference."""
    step_s = run.steady_step_s
    return run.on_gpu and step_s is not None and step_s < _TINY_STEP_S


def has_few_active_sms(run: RunMeasurements) -> bool:
    """Return whether the GPU looks busy while most of it has nothing to do."""
    return (
        run.gpu is not None
        and run.gpu.sm_active_percent is not None
        and run.gpu.sm_active_percent < _FEW_SMS_PERCENT
        and (run.utilization_percent or 0.0) >= _BUSY_PERCENT
    )


def _basis(known: bool) -> Literal["measured", "heuristic"]:
    return "measured" if known else "heuristic"


def _copy(run: RunMeasurements) -> Finding | None:
    between = 0.0 if run.gpu_idle is None else run.lost_share(COPY)
    inside, _ = _part_of_idle(run, "copy")
    share = min(between + inside, run.idle_share)
    if share < _MIN_SHARE:
        return None
    copy_s = share * run.step_s
    evidence: dict[str, float | str] = {"ms_per_step": copy_s * 1e3}
    if run.batch_bytes:
        evidence |= {"batch_bytes": run.batch_bytes, "bytes_per_second": run.batch_bytes / copy_s}
    if run.profile is not None:
        evidence["pageable_copies_per_step"] = run.profile.pageable_copies_per_step
    if run.loader is not None and not run.loader.pin_memory:
        advice = (
            "In the DataLoader set pin_memory=True (now False): from page-locked memory the GPU copies in the "
            "background, and Lightning asks for that already (non_blocking=True). A transfer_batch_to_device of "
            "yours must pass non_blocking=True, too."
        )
    else:
        advice = "Send less: images as uint8, to be converted on the GPU in on_after_batch_transfer."
    if len(run.ranks) > 1:
        advice += (
            " With several ranks Lightning waits for the GPU at the start of each step (its issue 21487), so that no "
            "copy is hidden behind the step before."
        )
    if run.left_on_cpu:
        evidence["left_on_cpu"] = ", ".join(run.left_on_cpu)
        advice += f" {_left_on_cpu_advice(run.left_on_cpu)}"
    return counted("host_to_device_copy", share, evidence, advice)


def _left_on_cpu_advice(names: tuple[str, ...]) -> str:
    return (
        f"On the CPU, and copied whenever it is used: {', '.join(names)}. Lightning moves only parameters, buffers and "
        "submodules: use register_buffer, and nn.ModuleList or nn.ParameterList instead of a list."
    )


def _part_of_idle(run: RunMeasurements, reason: str) -> tuple[float, bool]:
    """Return which fraction of the wall time the GPU idles inside the step for a reason, and whether that is known."""
    in_step, profile = run.idle_in_step_share, run.profile
    if in_step is None or profile is None:
        return 0.0, False
    idle_s = sum(profile.idle_s.values())
    if idle_s <= 0:
        return 0.0, False
    return in_step * profile.idle_s.get(reason, 0.0) / idle_s, True


def _sync(run: RunMeasurements) -> Finding | None:
    profile = run.profile
    if profile is None or profile.syncs_per_step < 1:
        return None
    share, known = _part_of_idle(run, "sync")
    if not known:  # no GPU was traced: then all of the idle time may be due to it
        share = run.idle_in_step_share or 0.0
    if share < _MIN_SHARE:
        return None
    evidence: dict[str, float | str] = {
        "ms_per_step": share * run.step_s * 1e3,
        "syncs_per_step": profile.syncs_per_step,
    }
    where = ""
    if profile.sync_lines:
        evidence["source_lines"] = ", ".join(profile.sync_lines)
        where = f" at {', '.join(profile.sync_lines)}"
    return counted(
        "device_sync",
        share,
        evidence,
        f"Each step waits for the GPU's results {profile.syncs_per_step:.3g} times{where}: remove .item(), float(), "
        "print and .cpu() there, or do it every 50th step. self.log takes the tensor as it is; prog_bar=True asks for "
        "its value as often as the bar is drawn.",
        _basis(known),
    )


def _launch(run: RunMeasurements) -> Finding | None:
    profile, in_step = run.profile, run.idle_in_step_share
    share, known = _part_of_idle(run, "launch")
    short = profile is not None and profile.kernel_median_us is not None and profile.kernel_median_us < _SHORT_KERNEL_US
    tiny = is_tiny(run)
    if tiny and not known:
        share = in_step or 0.0
    if share < _MIN_LAUNCH_SHARE or not (short or tiny):
        return None
    evidence: dict[str, float | str] = {"ms_per_step": share * run.step_s * 1e3, "step_ms": run.step_s * 1e3}
    if profile is not None and profile.kernel_median_us is not None:
        evidence |= {
            "kernel_median_us": profile.kernel_median_us,
            "kernels_per_step": profile.kernels_per_step,
        }
    bigger = larger_batch_advice(run.gpu, run.loader.batch_size if run.loader is not None else None)
    if tiny:
        advice = (
            f"The model is too small for this GPU: set {bigger or 'a larger batch_size'}, or train on the CPU, which "
            "would do."
        )
    else:
        advice = (
            "The host launches kernels more slowly than the GPU runs them: torch.compile(model, "
            "mode='reduce-overhead') (CUDA graphs), a fused optimizer (AdamW(..., fused=True))"
            + (f", or {bigger}." if bigger else ".")
        )
    return counted("launch_bound", share, evidence, advice, _basis(known))


def _small_batch(run: RunMeasurements) -> Finding | None:
    if not has_few_active_sms(run) or _communication(run) is not None:
        return None
    assert run.gpu is not None
    assert run.gpu.sm_active_percent is not None
    batch_size = run.loader.batch_size if run.loader is not None else None
    bigger = larger_batch_advice(run.gpu, batch_size)
    if not bigger:
        return None
    busy = (run.utilization_percent or 0.0) / 100
    share = (busy - run.gpu.sm_active_percent / 100) * (1 - run.phase_s.get("validation", 0.0) / run.wall_s)
    evidence: dict[str, float | str] = {"sm_active_percent": run.gpu.sm_active_percent}
    for name in ("step_memory_bytes", "memory_total_bytes"):
        if (value := getattr(run.gpu, name)) is not None:
            evidence[name] = value
    if batch_size is not None:
        evidence["batch_size"] = batch_size
    return counted(
        "small_batch",
        share,
        evidence,
        f"The kernels fill {run.gpu.sm_active_percent:.0f} % of the GPU: set {bigger}.",
        "heuristic",
    )


def low_precision(run: RunMeasurements) -> Finding | None:
    """Return what 16-bit numbers could gain: a remark, for the GPU does work."""
    gpu = run.gpu
    if (
        gpu is None
        or gpu.compute_capability is None
        or gpu.compute_capability < _VOLTA
        or gpu.tensor_active_percent is None
        or gpu.tensor_active_percent >= _NO_TENSOR_CORES_PERCENT
        or not (run.precision or "").startswith("32")
        or is_tiny(run)
    ):
        return None
    busy = (run.utilization_percent or 0.0) / 100
    share = busy * (1 - 1 / _HALF_PRECISION_SPEEDUP)
    if gpu.compute_capability >= _AMPERE:
        advice = "Trainer(precision='bf16-mixed')"
        if run.matmul_precision == "highest":
            advice += ", or with less change torch.set_float32_matmul_precision('high') (TF32)"
        advice += ": compare the validation metric."
    else:
        advice = (
            "Trainer(precision='16-mixed'): numbers beyond 65504 overflow in fp16, so look for a loss of inf or nan. "
            "This GPU has no bf16."
        )
    return counted(
        "low_precision",
        share,
        {"tensor_active_percent": gpu.tensor_active_percent, "precision": run.precision or ""},
        f"The tensor cores do nothing at precision {run.precision!r}: {advice}",
        "heuristic",
    )


def _communication(run: RunMeasurements) -> Finding | None:
    profile = run.profile
    if profile is None or profile.wall_s <= 0:
        return None
    share = profile.exposed_communication_s / profile.wall_s
    if share < _MIN_COMMUNICATION:
        return None
    return counted(
        "communication",
        min(share, 1.0),
        {"ms_per_step": profile.exposed_communication_s / profile.steps * 1e3, "ranks": max(1, len(run.ranks))},
        "The GPU waits for other GPUs: average gradients less often (Trainer(accumulate_grad_batches=4)), send half "
        "the bytes (bf16 compression: DDPStrategy(ddp_comm_hook=...bf16_compress_hook)), and set "
        "DDPStrategy(static_graph=True, gradient_as_bucket_view=True).",
    )


def unexplained_in_step(run: RunMeasurements, found: Sequence[Finding]) -> float:
    """Return the fraction of idle time inside the step for which no cause was found."""
    in_step = run.idle_in_step_share or 0.0
    named = sum(finding.share for finding in found if finding.cause in ("device_sync", "launch_bound"))
    named += _part_of_idle(run, "copy")[0]
    return max(0.0, in_step - named)


def wants_profile(run: RunMeasurements) -> bool:
    """Return whether a look inside the step with the profiler would tell what nothing else can."""
    in_step = run.idle_in_step_share
    if run.profile is not None or in_step is None or is_tiny(run):
        return False
    between = max(run.idle_by_phase().values(), default=0.0)
    return has_few_active_sms(run) or (in_step >= _MIN_SHARE and in_step > between)
