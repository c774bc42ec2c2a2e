"""What leaves the GPU idle inside the training step, and what slows a busy one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from lightning_gpu_tools.advice.findings import BUSY_PERCENT, FIND_FUNCTION, MIN_COMMUNICATION, Basis, Finding, counted
from lightning_gpu_tools.training.phases import RANK_WAIT, base_phase
from lightning_gpu_tools.training.run_measurements import COPY, VALIDATION, GpuFacts, RunMeasurements
from lightning_gpu_tools.units import printable

# Our defaults, unless a source is named.
_MIN_SHARE = 0.05  # torch's TensorBoard plugin, of the DataLoader
_NO_TENSOR_CORES_PERCENT = 1.0  # that plugin: 0
_FEW_SMS_PERCENT = 50.0  # DCGM's guide: "likely" ineffective
_MIN_LAUNCH_SHARE = 0.15  # a well-fed GPU has some gaps, too
_SHORT_KERNEL_US = 20.0  # twice what a launch takes the host
_TINY_STEP_S = 0.005
_VOLTA = (7, 0)  # has tensor cores
_AMPERE = (8, 0)  # has bfloat16 and TF32
_HALF_PRECISION_SPEEDUP = 2.0  # as half the bytes are, where memory is the limit
# By forward: twice (Kaplan et al. 2020, section 2.1), three times with activation checkpointing, more on busy cores.
_USUAL_BACKWARD = 3.0
_MAX_BACKWARD = 8.0
# By forward and backward together. On two cores with torch 2.13, Adam took 0.1 to 1.3 times as long, but 2.4 to 3.2
# with batches of one sample or a large embedding; fused=True left 13 to 25 %.
_MAX_OPTIMIZER = 2.0
_FUSED_SAVES = 0.7
_LOG_WITHOUT_SYNC = " Pass the tensor itself to self.log; prog_bar=True syncs each time the bar is drawn."
_CAVEAT = " With a larger batch, scale the learning rate and compare the validation metric."


def inside_step(run: RunMeasurements) -> list[Finding]:
    """Return the causes of GPU idle time inside the step."""
    if not run.on_gpu:
        return []
    found = [_copy(run), _sync(run), _launch(run), _small_batch(run), _communication(run)]
    return [finding for finding in found if finding is not None]


def out_of_proportion(run: RunMeasurements) -> list[Finding]:
    """Return backward or the optimizer on the CPU, if it takes far longer than the rest of the step accounts for.

    Several ranks wait for each other in backward, and a GPU's host runs ahead, so neither is judged.
    """
    if run.on_gpu or not run.optimizers or any(base_phase(phase) == RANK_WAIT for phase in run.phase_s):
        return []
    forward_s, backward_s, optimizer_s, step_s = (
        median(getattr(block, name) / block.steps for block in run.blocks)
        for name in ("forward_s", "backward_s", "optimizer_s", "wall_s")
    )
    if 0 < forward_s * _MAX_BACKWARD < backward_s:
        advice = (
            f"Backward takes {backward_s / forward_s:.0f} times as long as forward, usual is 1 to "
            f"{_USUAL_BACKWARD:.0f}. Look at gradient hooks, your own autograd functions, and large embeddings "
            "(sparse=True)."
        )
        avoidable = (backward_s - forward_s * _USUAL_BACKWARD) / step_s
        return [
            counted("backward", backward_s / step_s, {"ms_per_step": backward_s * 1e3}, advice, avoidable=avoidable)
        ]
    fusible = [name for name, kind in run.optimizers.items() if kind == "fusible"]
    is_slow = 0 < (forward_s + backward_s) * _MAX_OPTIMIZER < optimizer_s
    if is_slow and (fusible or "own" in run.optimizers.values()):
        advice = f"Set {printable(fusible[0])}(..., fused=True)." if fusible else FIND_FUNCTION
        evidence = {"ms_per_step": optimizer_s * 1e3, "name": " and ".join(run.optimizers)}
        share = optimizer_s / step_s
        return [counted("optimizer", share, evidence, advice, avoidable=share * (_FUSED_SAVES if fusible else 1.0))]
    return []


def is_tiny(run: RunMeasurements) -> bool:
    """Return whether the model is too small to gain from a GPU."""
    step_s = run.steady_step_s
    return run.on_gpu and step_s is not None and step_s < _TINY_STEP_S


def few_active_sms(run: RunMeasurements) -> float | None:
    """Return how many percent of the SMs work, if few do although the GPU looks busy."""
    percent = None if run.gpu is None else run.gpu.sm_active_percent
    is_busy = (run.utilization_percent or 0.0) >= BUSY_PERCENT
    return percent if percent is not None and percent < _FEW_SMS_PERCENT and is_busy else None


def _larger_batch(run: RunMeasurements) -> str:
    """Return which batch size to set; empty if there is no room for twice as much."""
    batch_size = run.loader.batch_size if run.loader is not None else None
    fits = run.largest_batch_size
    if fits is None or not batch_size:
        return "a larger batch_size"
    if fits < 2 * batch_size:
        return ""
    doubled = batch_size * 2 ** ((fits // batch_size).bit_length() - 1)
    return f"batch_size={doubled} (now {batch_size}; up to {fits} fit by measured memory)"


def _part_of_idle(run: RunMeasurements, reason: str) -> float | None:
    """Return the share of the wall time that the GPU idles inside the step for a reason; ``None``: unknown."""
    in_step, idle_s = run.idle_in_step_share, run.profile.idle_s if run.profile is not None else {}
    total_s = sum(idle_s.values())
    return in_step * idle_s.get(reason, 0.0) / total_s if in_step is not None and total_s > 0 else None


def _copy(run: RunMeasurements) -> Finding | None:
    between = 0.0 if run.gpu_idle is None else run.lost_share(COPY)
    share = min(between + (_part_of_idle(run, "copy") or 0.0), run.idle_share)
    if share < _MIN_SHARE:
        return None
    copy_s, left_on_cpu = share * run.step_s, ", ".join(run.left_on_cpu)
    evidence = {
        "ms_per_step": copy_s * 1e3,
        "batch_bytes": run.batch_bytes or None,
        "bytes_per_second": run.batch_bytes / copy_s if run.batch_bytes else None,
        "pageable_copies_per_step": None if run.profile is None else run.profile.pageable_copies_per_step,
        "left_on_cpu": left_on_cpu or None,
    }
    if run.loader is not None and not run.loader.pin_memory:
        by_itself, by_hand = (
            ("Lightning", "transfer_batch_to_device") if run.has_trainer else ("Fabric", "batch.to(device)")
        )
        advice = (
            "In the DataLoader set pin_memory=True (now False): the GPU copies page-locked memory in the background. "
            f"{by_itself} passes non_blocking=True; your own {by_hand} must, too."
        )
    else:
        hook = " in on_after_batch_transfer" if run.has_trainer else ""
        advice = f"Copy less: send images as uint8 and convert them on the GPU{hook}."
    if len(run.ranks) > 1 and run.has_trainer:
        advice += (
            " With several ranks no copy overlaps the previous step, because Lightning waits for the GPU before each "
            "(Lightning issue 21487)."
        )
    if left_on_cpu:
        advice += (
            f" Still on the CPU and copied on every use: {left_on_cpu}. Lightning moves parameters, buffers and "
            "submodules: use register_buffer, nn.ModuleList or nn.ParameterList."
        )
    return counted("host_to_device_copy", share, evidence, advice)


def _sync(run: RunMeasurements) -> Finding | None:
    profile = run.profile
    if profile is None or profile.syncs_per_step < 1:
        return None
    traced = _part_of_idle(run, "sync")
    # Where no GPU was traced, all of the idle time may be due to it.
    share = (run.idle_in_step_share or 0.0) if traced is None else traced
    if share < _MIN_SHARE:
        return None
    lines = ", ".join(profile.sync_lines)
    evidence = {
        "ms_per_step": share * run.step_s * 1e3,
        "syncs_per_step": profile.syncs_per_step,
        "source_lines": lines or None,
    }
    advice = (
        f"The host syncs with the GPU {profile.syncs_per_step:.3g}x per step{lines and f' at {lines}'}. Remove "
        f".item(), float(), print and .cpu() there, or call them every 50 steps."
        f"{_LOG_WITHOUT_SYNC if run.has_trainer else ''}"
    )
    return counted("device_sync", share, evidence, advice, "heuristic" if traced is None else "measured")


def _launch(run: RunMeasurements) -> Finding | None:
    profile, tiny = run.profile, is_tiny(run)
    traced = _part_of_idle(run, "launch")
    kernel_us = None if profile is None else profile.kernel_median_us
    is_short = kernel_us is not None and kernel_us < _SHORT_KERNEL_US
    share = (run.idle_in_step_share or 0.0) if tiny and traced is None else traced or 0.0
    if share < _MIN_LAUNCH_SHARE or not (is_short or tiny):
        return None
    evidence = {
        "ms_per_step": share * run.step_s * 1e3,
        "step_ms": run.step_s * 1e3,
        "kernel_median_us": kernel_us,
        "kernels_per_step": None if profile is None else profile.kernels_per_step or None,
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
    active_percent, larger = few_active_sms(run), _larger_batch(run)
    if active_percent is None or not larger or _communication(run) is not None:
        return None
    idle = ((run.utilization_percent or 0.0) - active_percent) / 100
    evidence = {
        "sm_active_percent": active_percent,
        "largest_batch_size": run.largest_batch_size,
        "batch_size": None if run.loader is None else run.loader.batch_size,
    }
    advice = f"The kernels fill {active_percent:.0f} % of the GPU. Set {larger}.{_CAVEAT}"
    in_training = 1 - run.phase_s.get(VALIDATION, 0.0) / run.wall_s
    return counted("small_batch", idle * in_training, evidence, advice, "heuristic")


def low_precision(run: RunMeasurements) -> Finding | None:
    """Return what 16-bit numbers could gain: a remark, because the GPU is not idle."""
    active_percent = None if run.gpu is None else run.gpu.tensor_active_percent
    capability = (run.gpu and run.gpu.compute_capability) or (0, 0)
    precision = run.precision or ""
    if active_percent is None or active_percent >= _NO_TENSOR_CORES_PERCENT:
        return None
    if capability < _VOLTA or not precision.startswith("32") or is_tiny(run):
        return None
    # The precision of a plain loop is unknown, so without a Trainer it is Fabric's.
    driver = "Trainer" if run.has_trainer else "Fabric"
    if capability >= _AMPERE:
        advice = f"Set {driver}(precision='bf16-mixed')"
        if run.matmul_precision == "highest":
            advice += ", or with less change torch.set_float32_matmul_precision('high') (TF32)"
        advice += ", and compare the validation metric."
    else:
        advice = (
            f"Set {driver}(precision='16-mixed'); this GPU has no bf16. Watch for a loss of inf or nan: fp16 overflows "
            "beyond 65504."
        )
    return counted(
        "low_precision",
        (run.utilization_percent or 0.0) / 100 * (1 - 1 / _HALF_PRECISION_SPEEDUP),
        {"tensor_active_percent": active_percent, "precision": precision},
        f"The tensor cores are idle at precision {precision!r}. {advice}",
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
        seldom, ddp = "Trainer(accumulate_grad_batches=4)", "DDPStrategy"
        half = "DDPStrategy(ddp_comm_hook=...bf16_compress_hook)"
    else:
        seldom, ddp = "no_sync() in three batches of four", "DistributedDataParallel"
        half = "register_comm_hook(None, bf16_compress_hook)"
    return counted(
        "communication",
        min(share, 1.0),
        {"ms_per_step": profile.exposed_communication_s / profile.steps * 1e3, "ranks": max(1, len(run.ranks))},
        f"The GPU waits for other GPUs. Average gradients less often ({seldom}) or send half the bytes ({half}). Also "
        f"set {ddp}(static_graph=True, gradient_as_bucket_view=True).",
    )


def unexplained_in_step(run: RunMeasurements, found: Sequence[Finding]) -> float:
    """Return the fraction of the wall time that the GPU idles inside the step without a cause."""
    of_step = ("device_sync", "launch_bound", "slow_steps", "cpu_contention")
    named = sum(finding.share for finding in found if finding.cause in of_step)
    return max(0.0, (run.idle_in_step_share or 0.0) - named - (_part_of_idle(run, "copy") or 0.0))


def wants_profile(run: RunMeasurements) -> bool:
    """Return whether profiling the step would show what nothing else can."""
    in_step = run.idle_in_step_share
    if run.profile is not None or in_step is None or is_tiny(run):
        return False
    between = max(run.idle_by_phase().values(), default=0.0)
    return few_active_sms(run) is not None or (in_step >= _MIN_SHARE and in_step > between)


# Our defaults.
_MIN_THERMAL_PERCENT = 5.0  # of the time
# Reaching the power limit is normal at full load, but not for so long and with clocks so far below the highest one.
_MIN_POWER_PERCENT = 50.0
_MAX_CLOCK_PERCENT = 85.0
_MIN_OTHERS_PERCENT = 5.0  # utilization, or where the driver does not report that:
_MIN_OTHERS_BYTES = 2**30


def held_down(run: RunMeasurements) -> list[Finding]:
    """Return what throttles the clocks: remarks, because that leaves no GPU idle."""
    gpu, found = run.gpu or GpuFacts(), []
    busy_percent, clock_percent = run.utilization_percent or 0.0, gpu.held_clock_percent
    # A kernel takes longer in proportion to the clock. Without a clock, count all that throttling may have cost.
    slowed = busy_percent / 100 * (1 - (clock_percent or 0.0) / 100)
    basis: Basis = "heuristic" if clock_percent is None else "measured"
    hot_percent, capped_percent = gpu.thermal_throttled_percent or 0.0, gpu.power_capped_percent or 0.0
    if hot_percent > _MIN_THERMAL_PERCENT:
        advice = (
            f"Heat throttled the clocks for {hot_percent:.0f} % of the time. Have the air flow, the fans and the "
            "neighboring GPU checked. A lower power limit (nvidia-smi -pl) steadies the clocks."
        )
        evidence = {"thermal_throttled_percent": hot_percent, "held_clock_percent": clock_percent}
        found.append(counted("thermal_throttling", hot_percent / 100 * slowed, evidence, advice, basis))
    is_slow = clock_percent is not None and clock_percent < _MAX_CLOCK_PERCENT
    if capped_percent > _MIN_POWER_PERCENT and is_slow and busy_percent >= BUSY_PERCENT:
        advice = (
            f"The power limit throttled the clocks for {capped_percent:.0f} % of the time. Ask the administrator to "
            "raise power.limit, at most to power.max_limit (nvidia-smi -q -d POWER)."
        )
        evidence = {"power_capped_percent": capped_percent, "held_clock_percent": clock_percent}
        found.append(counted("power_cap", capped_percent / 100 * slowed, evidence, advice, basis))
    return found


def shared_gpu(run: RunMeasurements) -> Finding | None:
    """Return that other jobs compute on the same GPU."""
    gpu = run.gpu
    if gpu is None:
        return None
    percent, size = gpu.others_utilization_percent, gpu.others_memory_bytes
    if (size or 0) <= _MIN_OTHERS_BYTES if percent is None else percent <= _MIN_OTHERS_PERCENT:
        return None
    pick = "FreeMemoryCUDAAccelerator(exclusive=True)" if run.has_trainer else "select_gpus(exclusive=True)"
    finding = counted(
        "shared_gpu",
        min((percent or 0.0) / 100, 1.0),
        {"others_utilization_percent": percent, "others_memory_bytes": size},
        f"Use a free GPU (lightning-gpu-tools pick --exclusive, or {pick}), then measure again.",
    )
    return replace(finding, ceiling_lower=1.0)
