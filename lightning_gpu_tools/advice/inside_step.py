"""What leaves the GPU idle, or half used, inside the training step: copies, waiting for results, small kernels.

On the CPU, which part of the step is out of proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning_gpu_tools.advice.findings import BUSY_PERCENT, FIND_FUNCTION, MIN_COMMUNICATION, Finding, counted
from lightning_gpu_tools.training.phases import RANK_WAIT, base_phase
from lightning_gpu_tools.training.run_measurements import COPY, RunMeasurements
from lightning_gpu_tools.units import printable

# torch's TensorBoard plugin reports the DataLoader from 5 % of the step on; the same for copies and syncs.
_MIN_SHARE = 0.05
# Our default: idle time inside the step counts as launch-bound from 15 % on; a well-fed GPU has some gaps, too.
_MIN_LAUNCH_SHARE = 0.15
# Launching a kernel takes the host 5 to 10 us. With kernels shorter than twice that, the host cannot stay ahead.
_SHORT_KERNEL_US = 20.0
# Our default: shorter steps belong to a model that is too small for a GPU.
_TINY_STEP_S = 0.005
# DCGM's guide: SM activity below 50 % "likely" is ineffective use of the GPU, however busy it looks.
_FEW_SMS_PERCENT = 50.0
# torch's TensorBoard plugin: tensor cores at 0 %, on hardware that has them (compute capability 7.0 and later). Our
# default: below 1 % counts as 0.
_NO_TENSOR_CORES_PERCENT = 1.0
# bfloat16 and TF32 in hardware: Ampere.
_AMPERE = (8, 0)
_VOLTA = (7, 0)
# Our estimate: 16-bit numbers halve the kernels' time, as half the bytes do where memory is the limit. Matrix products
# can gain more, other kernels less.
_HALF_PRECISION_SPEEDUP = 2.0
# Backward computes twice what forward does (Kaplan et al. 2020, section 2.1), and three times where it runs forward
# again (activation checkpointing). Our default: on busy cores it can take longer, so it is reported from 8 times on.
_USUAL_BACKWARD = 3.0
_MAX_BACKWARD = 8.0
# Our default: an optimizer is reported if it takes twice as long as forward and backward together. On two cores with
# torch 2.13, Adam took 0.1 to 1.3 times as long, but 2.4 to 3.2 times with batches of one sample or a large embedding.
# With fused=True it took 13 to 25 % of its time, so at least 70 % goes.
_MAX_OPTIMIZER = 2.0
_FUSED_SAVES = 0.7
_LOG_WITHOUT_SYNC = " Pass the tensor itself to self.log; prog_bar=True syncs each time the bar is drawn."
_CAVEAT = " With a larger batch, scale the learning rate and compare the validation metric."


def inside_step(run: RunMeasurements) -> list[Finding]:
    """Return the causes of GPU idle time inside the step, as far as the measurements show them."""
    if not run.on_gpu:
        return []
    found = [_copy(run), _sync(run), _launch(run), _small_batch(run), _communication(run)]
    return [finding for finding in found if finding is not None]


def out_of_proportion(run: RunMeasurements) -> list[Finding]:
    """Return backward or the optimizer on the CPU, if it takes far longer than the rest of the step accounts for.

    Not with several ranks, which wait for each other in backward, and not for a GPU, which the host runs ahead of.
    """
    if run.on_gpu or not run.optimizers or any(base_phase(phase) == RANK_WAIT for phase in run.phase_s):
        return []
    forward_s, backward_s, optimizer_s, step_s = (
        median(getattr(block, name) / block.steps for block in run.blocks)
        for name in ("forward_s", "backward_s", "optimizer_s", "wall_s")
    )
    if 0 < forward_s * _MAX_BACKWARD < backward_s:
        advice = (
            f"Backward usually takes 1 to {_USUAL_BACKWARD:.0f} times as long as forward, here "
            f"{backward_s / forward_s:.0f} times. Look at gradient hooks, at autograd functions of your own, and at "
            "large embeddings (sparse=True)."
        )
        avoidable = (backward_s - forward_s * _USUAL_BACKWARD) / step_s
        return [
            counted("backward", backward_s / step_s, {"ms_per_step": backward_s * 1e3}, advice, avoidable=avoidable)
        ]
    fusible, own = ([name for name, kind in run.optimizers.items() if kind == one] for one in ("fusible", "own"))
    if 0 < (forward_s + backward_s) * _MAX_OPTIMIZER < optimizer_s and (fusible or own):
        advice = f"Set {printable(fusible[0])}(..., fused=True)." if fusible else FIND_FUNCTION
        evidence = {"ms_per_step": optimizer_s * 1e3, "name": " and ".join(run.optimizers)}
        share = optimizer_s / step_s
        return [counted("optimizer", share, evidence, advice, avoidable=share * (_FUSED_SAVES if fusible else 1.0))]
    return []


def is_tiny(run: RunMeasurements) -> bool:
    """Return whether the model is too small to gain from a GPU."""
    step_s = run.steady_step_s
    return run.on_gpu and step_s is not None and step_s < _TINY_STEP_S


def has_few_active_sms(run: RunMeasurements) -> bool:
    """Return whether the GPU looks busy while most of it has nothing to do."""
    return (
        run.gpu is not None
        and run.gpu.sm_active_percent is not None
        and run.gpu.sm_active_percent < _FEW_SMS_PERCENT
        and (run.utilization_percent or 0.0) >= BUSY_PERCENT
    )


def _larger_batch(run: RunMeasurements) -> str:
    """Return which batch size to set, with the limit by measured memory where it is known; empty if none is larger."""
    batch_size = run.loader.batch_size if run.loader is not None else None
    fits = run.largest_batch_size
    if fits is None or not batch_size:
        return "a larger batch_size"
    if fits < 2 * batch_size:
        return ""  # no room for a batch twice as large
    doubled = batch_size * 2 ** ((fits // batch_size).bit_length() - 1)
    return f"batch_size={doubled} (now {batch_size}; up to {fits} fit by measured memory)"


def _copy(run: RunMeasurements) -> Finding | None:
    between = 0.0 if run.gpu_idle is None else run.lost_share(COPY)
    share = min(between + (_part_of_idle(run, "copy") or 0.0), run.idle_share)
    if share < _MIN_SHARE:
        return None
    copy_s = share * run.step_s
    evidence: dict[str, float | str] = {"ms_per_step": copy_s * 1e3}
    if run.batch_bytes:
        evidence |= {"batch_bytes": run.batch_bytes, "bytes_per_second": run.batch_bytes / copy_s}
    if run.profile is not None:
        evidence["pageable_copies_per_step"] = run.profile.pageable_copies_per_step
    if run.loader is not None and not run.loader.pin_memory:
        by_itself, by_hand = (
            ("Lightning", "transfer_batch_to_device") if run.has_trainer else ("Fabric", "batch.to(device)")
        )
        advice = (
            "In the DataLoader set pin_memory=True (now False). The GPU copies page-locked memory in the background; "
            f"{by_itself} already passes non_blocking=True. Your own {by_hand} must pass it, too."
        )
    else:
        hook = " in on_after_batch_transfer" if run.has_trainer else ""
        advice = f"Copy less: send images as uint8 and convert them on the GPU{hook}."
    if len(run.ranks) > 1 and run.has_trainer:
        advice += (
            " With several ranks Lightning waits for the GPU at the start of each step (Lightning issue 21487), so no "
            "copy overlaps the previous step."
        )
    if run.left_on_cpu:
        evidence["left_on_cpu"] = ", ".join(run.left_on_cpu)
        advice += (
            f" Still on the CPU and copied on every use: {evidence['left_on_cpu']}. Lightning moves only parameters, "
            "buffers and submodules: use register_buffer, nn.ModuleList or nn.ParameterList."
        )
    return counted("host_to_device_copy", share, evidence, advice)


def _part_of_idle(run: RunMeasurements, reason: str) -> float | None:
    """Return the fraction of the wall time for which the GPU idles inside the step for a reason; ``None``: unknown."""
    in_step, idle_s = run.idle_in_step_share, run.profile.idle_s if run.profile is not None else {}
    total_s = sum(idle_s.values())
    return in_step * idle_s.get(reason, 0.0) / total_s if in_step is not None and total_s > 0 else None


def _sync(run: RunMeasurements) -> Finding | None:
    profile = run.profile
    if profile is None or profile.syncs_per_step < 1:
        return None
    traced = _part_of_idle(run, "sync")
    # Where no GPU was traced, all of the idle time may be due to it.
    share = (run.idle_in_step_share or 0.0) if traced is None else traced
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
        f"The host syncs with the GPU {profile.syncs_per_step:.3g}x per step{where}. Remove .item(), float(), print "
        f"and .cpu() there, or call them every 50 steps.{_LOG_WITHOUT_SYNC if run.has_trainer else ''}",
        "heuristic" if traced is None else "measured",
    )


def _launch(run: RunMeasurements) -> Finding | None:
    profile, in_step = run.profile, run.idle_in_step_share
    traced = _part_of_idle(run, "launch")
    short = profile is not None and profile.kernel_median_us is not None and profile.kernel_median_us < _SHORT_KERNEL_US
    tiny = is_tiny(run)
    share = (in_step or 0.0) if tiny and traced is None else traced or 0.0
    if share < _MIN_LAUNCH_SHARE or not (short or tiny):
        return None
    evidence: dict[str, float | str] = {"ms_per_step": share * run.step_s * 1e3, "step_ms": run.step_s * 1e3}
    if profile is not None and profile.kernel_median_us is not None:
        evidence |= {
            "kernel_median_us": profile.kernel_median_us,
            "kernels_per_step": profile.kernels_per_step,
        }
    larger = _larger_batch(run)
    if tiny:
        larger = larger or "a larger batch_size"
        advice = f"The model is too small for this GPU. Set {larger}, or train on the CPU.{_CAVEAT}"
    else:
        advice = (
            "The host launches kernels more slowly than the GPU runs them. Use torch.compile(model, "
            "mode='reduce-overhead') (CUDA graphs), a fused optimizer (AdamW(..., fused=True))"
            + (f", or {larger}.{_CAVEAT}" if larger else ".")
        )
    return counted("launch_bound", share, evidence, advice, "heuristic" if traced is None else "measured")


def _small_batch(run: RunMeasurements) -> Finding | None:
    if not has_few_active_sms(run) or _communication(run) is not None:
        return None
    assert run.gpu is not None
    assert run.gpu.sm_active_percent is not None
    larger = _larger_batch(run)
    if not larger:
        return None
    busy = (run.utilization_percent or 0.0) / 100
    share = (busy - run.gpu.sm_active_percent / 100) * (1 - run.phase_s.get("validation", 0.0) / run.wall_s)
    evidence: dict[str, float | str] = {"sm_active_percent": run.gpu.sm_active_percent}
    if run.largest_batch_size is not None:
        evidence["largest_batch_size"] = run.largest_batch_size
    if run.loader is not None and run.loader.batch_size is not None:
        evidence["batch_size"] = run.loader.batch_size
    return counted(
        "small_batch",
        share,
        evidence,
        f"The kernels fill {run.gpu.sm_active_percent:.0f} % of the GPU. Set {larger}.{_CAVEAT}",
        "heuristic",
    )


def low_precision(run: RunMeasurements) -> Finding | None:
    """Return what 16-bit numbers could gain: a remark, because the GPU is not idle."""
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
    # A plain loop has no setting of precision that could be known, so without a Trainer it is Fabric's.
    driver = "Trainer" if run.has_trainer else "Fabric"
    if gpu.compute_capability >= _AMPERE:
        advice = f"Set {driver}(precision='bf16-mixed')"
        if run.matmul_precision == "highest":
            advice += ", or with less change torch.set_float32_matmul_precision('high') (TF32)"
        advice += ", and compare the validation metric."
    else:
        advice = (
            f"Set {driver}(precision='16-mixed'); this GPU has no bf16. Numbers beyond 65504 overflow in fp16, so "
            "watch for a loss of inf or nan."
        )
    return counted(
        "low_precision",
        share,
        {"tensor_active_percent": gpu.tensor_active_percent, "precision": run.precision or ""},
        f"The tensor cores are idle at precision {run.precision!r}. {advice}",
        "heuristic",
    )


def _communication(run: RunMeasurements) -> Finding | None:
    profile = run.profile
    if profile is None or profile.wall_s <= 0:
        return None
    share = profile.exposed_communication_s / profile.wall_s
    if share < MIN_COMMUNICATION:
        return None
    if run.has_trainer:
        seldom, half, ddp = (
            "Trainer(accumulate_grad_batches=4)",
            "DDPStrategy(ddp_comm_hook=...bf16_compress_hook)",
            "DDPStrategy",
        )
    else:
        seldom, half, ddp = (
            "no_sync() in three batches of four",
            "register_comm_hook(None, bf16_compress_hook)",
            "DistributedDataParallel",
        )
    return counted(
        "communication",
        min(share, 1.0),
        {"ms_per_step": profile.exposed_communication_s / profile.steps * 1e3, "ranks": max(1, len(run.ranks))},
        f"The GPU waits for other GPUs. Average gradients less often ({seldom}) or send half the bytes ({half}). Also "
        f"set {ddp}(static_graph=True, gradient_as_bucket_view=True).",
    )


def unexplained_in_step(run: RunMeasurements, found: Sequence[Finding]) -> float:
    """Return the fraction of idle time inside the step for which no cause was found."""
    in_step = run.idle_in_step_share or 0.0
    named = sum(finding.share for finding in found if finding.cause in ("device_sync", "launch_bound", "slow_steps"))
    named += _part_of_idle(run, "copy") or 0.0
    return max(0.0, in_step - named)


def wants_profile(run: RunMeasurements) -> bool:
    """Return whether profiling the step would show what nothing else can."""
    in_step = run.idle_in_step_share
    if run.profile is not None or in_step is None or is_tiny(run):
        return False
    between = max(run.idle_by_phase().values(), default=0.0)
    return has_few_active_sms(run) or (in_step >= _MIN_SHARE and in_step > between)
