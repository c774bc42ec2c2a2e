"""Why GPU memory ran out, what prevents it, and the largest batch size that fits. Pure; bytes throughout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from lightning_gpu_tools.advice.failures import LOADING_CHECKPOINT, SETUP, OutOfMemory
from lightning_gpu_tools.advice.findings import Cause, Evidence, Finding, counted
from lightning_gpu_tools.advice.memory_account import KEPT, growing_memory
from lightning_gpu_tools.gpus.readings import GpuProcess
from lightning_gpu_tools.training.memory_readings import RankMemory
from lightning_gpu_tools.training.phases import FORWARD, OPTIMIZER, TRAINING_STEP, VALIDATION, base_phase
from lightning_gpu_tools.training.run_measurements import COPY, RunMeasurements
from lightning_gpu_tools.units import format_bytes, printable

MARGIN = 0.20  # loadtune's, for rounding, fragments and cuDNN's workspaces
# Our default where a peak in forward hides what backward needs for a moment, by what forward needed so: products have
# two results in backward, each as large as their input.
_IN_BACKWARD = 3
_IN_STEPS = ("forward", "backward", "optimizer", "training")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPeak:
    """The memory of a step with a batch of one size."""

    batch_size: int  # in samples, or in numbers where samples differ in length
    begin_bytes: int  # in tensors when the step began, without the batch
    peak_bytes: int
    freed_bytes: int = 0  # before backward: Lightning keeps the old gradients through forward
    backward_bytes: int | None = None  # the most backward needed beside what is left then; None: up to the peak
    is_complete: bool = True  # otherwise it failed, and would have needed more


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """The largest batch size that fits, or why it is not known."""

    size: int | None = None  # 0: not even one sample fits
    is_bound: bool = False  # it is only known that larger ones do not fit
    why_not: str = ""  # why there is no size, as a sentence


def step_peak(memory: RankMemory, batch_bytes: int = 0, *, by_items: bool = False) -> StepPeak | None:
    """Return the peak of a rank's steps with the size of the last batch, in samples or in numbers.

    ``None`` without a step after the first one, which begins without the optimizer's states. Where batches differ in
    size, too little is found to fit, never too much.
    """
    step, first = memory.last_step, memory.first_step
    if step is None or first is None or step.step <= first.step or not step.batch_shape or step.begin is None:
        return None
    in_steps = {phase: memory.peaks_bytes[phase] for phase in _IN_STEPS if phase in memory.peaks_bytes}
    begin = max(0, step.begin.allocated_bytes - batch_bytes)
    peak = max([*in_steps.values(), *(one.allocated_bytes for one in step.readings)])
    freed = min(begin, memory.holdings.gradients_kept_bytes) if memory.holdings is not None else 0
    left = begin - freed
    backward = peak - left
    if in_steps.get("forward") == peak and step.after_forward is not None and step.before_backward is not None:
        for_a_moment = _IN_BACKWARD * (peak - step.after_forward.allocated_bytes)
        backward = min(backward, step.before_backward.allocated_bytes - left + for_a_moment)
    return StepPeak(
        batch_size=math.prod(step.batch_shape) if by_items else step.batch_shape[0],
        begin_bytes=begin,
        peak_bytes=peak,
        freed_bytes=freed,
        backward_bytes=backward,
    )


def largest_batch(peaks: Iterable[StepPeak], room_bytes: float, total_bytes: int) -> LargestBatch:
    """Return the largest batch size whose step fits.

    The step with the largest batch decides, not a line through two: with small batches the peak is in the optimizer or
    in forward, with large ones in backward. ``room_bytes`` is what other processes and CUDA leave of ``total_bytes``.
    """
    known = [peak for peak in peaks if peak.peak_bytes > peak.begin_bytes and peak.batch_size > 0]
    if not known:
        return LargestBatch(why_not="No step was measured whose batch made the memory rise.")
    complete = [peak for peak in known if peak.is_complete]
    step = max(complete or known, key=lambda peak: (peak.batch_size, peak.peak_bytes))
    room_bytes -= MARGIN * total_bytes
    left = step.begin_bytes - step.freed_bytes
    backward = step.peak_bytes - left if step.backward_bytes is None else step.backward_bytes
    parts = [(step.begin_bytes, step.peak_bytes - step.begin_bytes), (left, backward)]
    fit = [step.batch_size * (room_bytes - fixed) / for_batch for fixed, for_batch in parts if for_batch > 0]
    failed = [peak.batch_size - 1 for peak in known if not peak.is_complete]
    size = min([max(0, math.floor(min(fit))), *failed])
    return LargestBatch(size=size, is_bound=not step.is_complete)


def split(batch_size: int, fits: int, accumulate: int = 1) -> tuple[int, int]:
    """Return a batch size of at most ``fits``, and over how many batches to accumulate gradients with it.

    They keep the effective batch size, exactly where at most twice as many parts as needed divide it.
    """
    least = math.ceil(batch_size / fits)
    parts = next((parts for parts in range(least, 2 * least + 1) if batch_size % parts == 0), least)
    return math.ceil(batch_size / parts), parts * accumulate


_LEFT_BY_CHECKPOINTING = 0.2  # measured in a transformer of 6 layers: 5.7 of 28.2 MiB a sample


def in_validation(oom: OutOfMemory) -> bool:
    """Return whether the error came in validation."""
    return base_phase(oom.phase) == VALIDATION


def largest_that_fits(run: RunMeasurements, oom: OutOfMemory, *, by_items: bool = False) -> LargestBatch:
    """Return the largest batch size that would have fitted, in samples or in numbers."""
    if oom.room_bytes is None:
        return LargestBatch(why_not="The error does not say how much memory there is.")
    if oom.batch_shape and not by_items and samples(run, oom) is None:
        return LargestBatch(why_not="The first tensor of a batch does not begin with its samples.")
    peaks = []
    if oom.memory is not None and not in_validation(oom):
        complete = step_peak(oom.memory, run.batch_bytes or 0, by_items=by_items)
        peaks = [] if complete is None else [complete]
    if oom.batch_shape and oom.allocated_bytes is not None and oom.begin_bytes is not None:
        taken = oom.wanted_bytes - oom.begin_bytes
        # What comes with the first step of the optimizer takes room, too.
        fixed = oom.begin_bytes if in_validation(oom) else max(oom.begin_bytes, oom.model.total_bytes)
        batch = math.prod(oom.batch_shape) if by_items else oom.batch_shape[0]
        peaks.append(StepPeak(batch_size=batch, begin_bytes=fixed, peak_bytes=fixed + taken, is_complete=False))
    return largest_batch(peaks, oom.room_bytes, oom.total_bytes or oom.room_bytes)


def smaller_batch(run: RunMeasurements, oom: OutOfMemory, size: int | None, fits: LargestBatch) -> str:
    """Return which batch size to set."""
    where = " of the validation loader" if in_validation(oom) else ""
    if size is None or fits.size is None:
        return f"Lower the batch size{where}{f' (now {size})' if size else ''}. {fits.why_not}".strip()
    if fits.size < 1:
        return "Not even a batch of 1 fits by measured memory."
    known = f"At most {fits.size} fit" if fits.is_bound else f"{fits.size} fit by measured memory"
    if in_validation(oom):
        return f"Set batch_size={fits.size}{where} (now {size}). {known}."
    smaller, accumulate = split(size, fits.size, run.accumulate_grad_batches)
    if run.has_trainer:
        keep = f"accumulate_grad_batches={accumulate} (now {run.accumulate_grad_batches})"
    else:
        keep = f"optimizer.step() after every {accumulate} batches, with the loss divided by {accumulate}"
    more = ", because the step that failed did not come to its end" if fits.is_bound else ""
    return f"Set batch_size={smaller} (now {size}), and to keep the effective batch size {keep}. {known}{more}."


def samples(run: RunMeasurements, oom: OutOfMemory) -> int | None:
    """Return how many samples the batch has; ``None`` if its first tensor does not begin with them."""
    size = oom.batch_shape[0] if oom.batch_shape else None
    known = None if run.loader is None or in_validation(oom) else run.loader.batch_size
    return None if size is None or (known is not None and size > known) else size


def levers(run: RunMeasurements, oom: OutOfMemory) -> str:
    """Return what frees memory at the same batch size, with how much."""
    step = None if oom.memory is None else oom.memory.last_step
    known = [0]
    if oom.begin_bytes is not None and oom.allocated_bytes is not None:
        known.append(oom.allocated_bytes - oom.begin_bytes)
    if step is not None and step.begin is not None:
        after = [reading for reading in (step.after_forward, step.before_backward) if reading is not None]
        known += [reading.allocated_bytes - step.begin.allocated_bytes for reading in after]
    activations = max(known)
    if not activations or in_validation(oom):
        return ""
    left = format_bytes(_LEFT_BY_CHECKPOINTING * activations)
    found = [f"activation checkpointing (about {left} of {format_bytes(activations)} are left)"]
    model = oom.model
    halved = (activations - model.parameters_bytes) / 2  # autocast keeps a 16-bit copy of the weights
    if is_32(run) and halved > 0:
        found.append(f"precision='bf16-mixed' (frees up to {format_bytes(halved)})")
    held = None if oom.memory is None else oom.memory.holdings
    if run.has_trainer and oom.phase == FORWARD and held is not None and held.gradients_kept_bytes:
        freed = format_bytes(held.gradients_kept_bytes)
        found.append(f"optimizer.zero_grad() in on_train_batch_end (frees {freed} in forward)")
    return f"Or keep the batch size with {'; '.join(found)}."


def is_32(run: RunMeasurements) -> bool:
    """Return whether the model is known to compute with 32 bits."""
    return (run.precision or "").startswith("32")


def sharded(oom: OutOfMemory) -> str:
    """Return what sharding would leave on each GPU of this machine; empty where that is done or no help."""
    count, size = len(oom.gpus), oom.model.total_bytes
    if oom.is_sharded or count < 2 or not size:
        return ""
    return f"FSDP over {count} GPUs leaves {format_bytes(size / count)} of the model's {format_bytes(size)} on each."


def needed_bytes(oom: OutOfMemory) -> float:
    """Return what this job would have needed of the GPU at least."""
    tensors = oom.wanted_bytes
    to_come = max(0, oom.model.total_bytes - (oom.begin_bytes or oom.allocated_bytes or 0))
    if oom.has_completed_steps and oom.memory is not None:
        tensors, to_come = max(tensors, oom.memory.peak_bytes), 0
    beside = 0
    if oom.total_bytes is not None and oom.free_bytes is not None and oom.reserved_bytes is not None:
        beside = max(0, oom.total_bytes - oom.free_bytes - oom.reserved_bytes - oom.others_bytes)
    return tensors + to_come + beside


def needed(oom: OutOfMemory) -> str:
    """Return the same with a margin, for a command line."""
    least = needed_bytes(oom) * (1 + MARGIN)
    size, unit = (2**30, "GiB") if least >= 2**30 else (2**20, "MiB")
    return f"{math.ceil(least / size)}{unit}"


def another_gpu(oom: OutOfMemory) -> str:
    """Return which free GPU of this machine would do; empty without one."""
    least = max(needed_bytes(oom) * (1 + MARGIN), oom.room_bytes or 0)
    others = [(gpu.memory_free_bytes or 0, -gpu.index) for gpu in oom.gpus if gpu.uuid != oom.uuid and not gpu.error]
    free, index = max(others, default=(-1, 0))
    if free < least or oom.uuid is None:
        return ""
    pick = f"CUDA_VISIBLE_DEVICES=$(lightning-gpu-tools pick --min-free {needed(oom)})"
    return f"GPU {-index} has {format_bytes(free)} free: {pick}."


def record(run: RunMeasurements) -> str:
    """Return what shows who allocates memory."""
    if run.has_trainer:
        return "GPUUtilizationMonitor(memory_history=True) records who allocates what, for pytorch.org/memory_viz."
    return "A snapshot shows who allocates what: https://pytorch.org/blog/understanding-gpu-memory-1/."


# Our defaults.
_SPIKE = 1.5  # times as many numbers as the median batch
_MIN_SHARE = 0.10  # of the memory: from here on others, what is in pieces, and growth are a cause
_NEARLY = 1.1  # a step that needs up to a tenth more than any other is one of many that hardly fit
_MODEL_SHARE = 0.85  # of the memory: a model is too large that takes this much before any batch
# Memory grows if the medians of four consecutive parts of the run rise, by chance in 1 of 4! = 24 runs.
_PARTS = 4


Ruling = tuple[Finding, str]  # a cause, and the sentence that says why it is one


def judge(run: RunMeasurements, oom: OutOfMemory) -> tuple[tuple[Finding, ...], str, str]:
    """Return the causes, the first one first; why memory ran out; and what to do now."""
    if oom.message.source == "host":
        rulings = [_host(run, oom)]
    else:
        found = [rule(run, oom) for rule in _RULES]
        rulings = [ruling for ruling in found if ruling is not None] or [_unexplained(run, oom)]
    first, why = rulings[0]
    who = f"Rank {oom.rank}: " if len(run.ranks) > 1 or oom.rank else ""
    return tuple(finding for finding, _ in rulings), f"{who}{_what(oom)} {why}", first.advice


def _what(oom: OutOfMemory) -> str:
    message, parts = oom.message, []
    if message.requested_bytes:
        parts.append(f"{message.name} asked for {format_bytes(message.requested_bytes)}")
    if message.allowed_bytes is not None and oom.reserved_bytes is not None:
        parts.append(f"it has {format_bytes(oom.reserved_bytes)} of the {format_bytes(message.allowed_bytes)} allowed")
    elif oom.free_bytes is not None and oom.total_bytes is not None and message.source != "host":
        parts.append(f"{format_bytes(oom.free_bytes)} of {format_bytes(oom.total_bytes)} were free")
    return f"Out of memory in {oom.place} at step {oom.step}{': ' if parts else ''}{' and '.join(parts)}."


def _ruling(oom: OutOfMemory, cause: Cause, why: str, *advice: str, **evidence: float | str | None) -> Ruling:
    """Return a ruling of which the evidence also has what is known of every error. Empty sentences are left out."""
    reserved, allocated, model = oom.reserved_bytes, oom.allocated_bytes, oom.model
    common: Evidence = {
        "phase": oom.phase,
        "step": oom.step,
        "requested_bytes": oom.message.requested_bytes,
        "free_bytes": oom.free_bytes,
        "total_bytes": oom.total_bytes,
        "allowed_bytes": oom.message.allowed_bytes,
        "allocated_bytes": allocated,
        "cached_bytes": None if reserved is None or allocated is None else reserved - allocated,
        "others_bytes": oom.others_bytes or None,
        "begin_bytes": oom.begin_bytes,
        "parameters_bytes": model.parameters_bytes or None,
        "gradients_bytes": model.gradients_bytes or None,
        "optimizer_bytes": model.optimizer_bytes or None,
    }
    return counted(cause, 0.0, {**common, **evidence}, " ".join(filter(None, advice))), why


def _loading_checkpoint(run: RunMeasurements, oom: OutOfMemory) -> Ruling | None:
    if oom.phase != LOADING_CHECKPOINT:
        return None
    allocated, model = oom.allocated_bytes, oom.model.parameters_bytes
    beside = f" beside the model's {format_bytes(model)}" if model else ""
    held = f"{format_bytes(allocated)} were in tensors{beside}" if allocated else "the model was there already"
    load = "plugins=[PortableCheckpointIO()]" if run.has_trainer else "load_weights(model, path)"
    return _ruling(
        oom,
        "loading_checkpoint",
        f"The checkpoint was loaded onto the GPU, where {held}.",
        f"Load it to the host: torch.load(path, map_location='cpu', mmap=True), or {load}.",
        another_gpu(oom),
    )


def _spike(run: RunMeasurements, oom: OutOfMemory) -> Ruling | None:
    if in_validation(oom) or not oom.batch_shape or not oom.usual_items or not oom.has_completed_steps:
        return None
    items = math.prod(oom.batch_shape)
    times = items / oom.usual_items
    if times < _SPIKE:
        return None
    shape = " x ".join(map(str, oom.batch_shape))
    fits = largest_that_fits(run, oom, by_items=True)
    return _ruling(
        oom,
        "spike",
        f"This batch has {times:.3g} times as many numbers as usual ({shape}; the median is {oom.usual_items:.0f}).",
        "Bound the numbers in a batch: cut long samples, or put samples of similar length together.",
        f"By measured memory, {fits.size} numbers fit in a batch." if fits.size else "",
        levers(run, oom),
        batch_items=items,
        usual_items=oom.usual_items,
        largest_batch_items=fits.size or None,
    )


def _other_processes(run: RunMeasurements, oom: OutOfMemory) -> Ruling | None:
    size, total, room = oom.others_bytes, oom.total_bytes, oom.room_bytes
    missing = oom.requested_bytes - (oom.free_bytes or 0)
    if not size or size < missing or total is None or room is None or oom.message.allowed_bytes is not None:
        return None
    if oom.has_completed_steps and oom.memory is not None:
        # This job had more of the GPU before than it can have now, and needs no more.
        before = oom.memory.latest
        needs_more = oom.wanted_bytes > before.peak_allocated_bytes
        is_cause = room + missing <= before.peak_reserved_bytes and not needs_more
    else:
        is_cause = size >= _MIN_SHARE * total and needed_bytes(oom) <= total
    if not is_cause:
        return None
    orphans = [one for one in oom.others if one.pid in oom.orphans]
    left = sum(one.memory_used_bytes or 0 for one in orphans)
    if 2 * left >= size:
        pids = " ".join(str(one.pid) for one in orphans)
        return _ruling(
            oom,
            "leftover_process",
            f"{_named(orphans)} on this GPU, left over by a program that has ended.",
            f"End it if it is not needed: kill {pids}.",
            pids=pids,
            leftover_bytes=left,
        )
    pick = "FreeMemoryCUDAAccelerator" if run.has_trainer else "select_gpus"
    wait = f"No other GPU has that much free; wait: lightning-gpu-tools run --min-free {needed(oom)} --wait 2h -- CMD."
    return _ruling(
        oom,
        "other_processes",
        f"Other processes hold {format_bytes(size)} of this GPU: {_named(oom.others[:3])}.",
        f"This job needs {needed(oom)}.",
        another_gpu(oom) or wait,
        f"{pick}(min_free='{needed(oom)}') claims it.",
        pids=" ".join(str(one.pid) for one in oom.others),
    )


def _named(processes: Sequence[GpuProcess]) -> str:
    found = []
    for one in processes:
        name = f" ({printable(one.name, 40)})" if one.name else ""
        owner = f" of {printable(one.user, 40)}" if one.user else ""
        size = "an unknown part" if one.memory_used_bytes is None else format_bytes(one.memory_used_bytes)
        found.append(f"process {one.pid}{name}{owner} has {size}")
    return ", ".join(found)


def _evaluation(run: RunMeasurements, oom: OutOfMemory) -> Ruling | None:
    grown = _growth(oom.validation_begins, oom) if in_validation(oom) else None
    if grown is None:
        return None
    per_batch, _, total = grown
    cause: Cause = "evaluation_graph" if oom.grad_enabled else "memory_growth"
    if oom.grad_enabled:
        reason = "with its graph: gradients are enabled in validation."
        advice = (
            f"{'Remove torch.enable_grad() from' if run.has_trainer else 'Put torch.no_grad() around'} validation, or "
            "detach what it keeps: metric.detach(), outputs moved to the CPU."
        )
    else:
        reason = "because something keeps its outputs."
        advice = "Reduce outputs to numbers in each validation batch, or move what is kept to the CPU (.cpu())."
    return _ruling(
        oom,
        cause,
        f"Each validation batch keeps {format_bytes(per_batch)} of the GPU, {format_bytes(total)} so far, {reason}",
        advice,
        bytes_per_batch=per_batch,
        grown_bytes=total,
        batch=oom.validation_begins[-1][0],
    )


def _memory_growth(run: RunMeasurements, oom: OutOfMemory) -> Ruling | None:
    grown = _growth(oom.begins, oom)
    if grown is None:
        return None
    per_step, since, total = grown
    return _ruling(
        oom,
        "memory_growth",
        f"What is kept from step to step has grown by {format_bytes(per_step)} a step since step {since:.0f}, "
        f"{format_bytes(total)} in all.",
        KEPT["gpu"].format(what="step"),
        record(run),
        bytes_per_step=per_step,
        since_step=since,
        grown_bytes=total,
    )


def _growth(points: Sequence[tuple[float, float]], oom: OutOfMemory) -> tuple[float, float, float] | None:
    """Return bytes a step, since which step, and how much in all; ``None`` if that is not steady, or no cause."""
    points = [point for point in points if point[0] > 1]  # the first step makes the optimizer's states
    if len(points) < _PARTS or oom.room_bytes is None:
        return None
    bounds = [round(i * len(points) / _PARTS) for i in range(_PARTS + 1)]
    parts = [points[begin:end] for begin, end in itertools.pairwise(bounds)]
    sizes = [median(size for _, size in part) for part in parts]
    total = points[-1][1] - min(size for _, size in points)
    if sorted(set(sizes)) != sizes or total < max(_MIN_SHARE * oom.room_bytes, oom.requested_bytes):
        return None
    since = max(step for step, size in points if size <= points[-1][1] - 0.95 * total)
    slope = median(
        (later - size) / (after - step)
        for i, (step, size) in enumerate(points)
        for after, later in points[i + 1 :]
        if step >= since
    )
    return slope, since, total


def _fragmentation(run: RunMeasurements, oom: OutOfMemory) -> Ruling | None:
    allocated, reserved = oom.allocated_bytes, oom.reserved_bytes
    if allocated is None or reserved is None or not oom.requested_bytes:
        return None
    # What CUDA graphs keep is no fragment.
    unused = reserved - allocated - (oom.message.graph_pool_bytes or 0)
    if unused < max(oom.requested_bytes, _MIN_SHARE * reserved):
        return None
    retries = None if oom.reading is None else oom.reading.retries
    times = "once" if retries == 1 else f"{retries} times"
    again = f", and has emptied its cache {times} to go on" if retries else ""
    return _ruling(
        oom,
        "fragmentation",
        f"torch holds {format_bytes(unused)} that no tensor uses, in pieces below {format_bytes(oom.requested_bytes)}"
        f"{again}.",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment before training. Batches of few "
        "different sizes help, too.",
        fragmented_bytes=unused,
        retries=retries,
    )


def _optimizer_too_large(run: RunMeasurements, oom: OutOfMemory) -> Ruling | None:
    if oom.phase != OPTIMIZER:
        return None
    model, names = oom.model, " and ".join(map(printable, oom.model.fusible))
    states = f" Its states need {format_bytes(model.optimizer_bytes)}." if model.optimizer_bytes else ""
    first = "the optimizer" if oom.has_completed_steps else "the optimizer's first step, which makes its states,"
    fused = f"Set {names}(..., fused=True): its step needs up to {format_bytes(model.parameters_bytes)} less."
    return _ruling(
        oom,
        "optimizer_too_large",
        f"Forward and backward fit; {first} did not.{states}",
        fused if names else "",
        "An optimizer with 8-bit states, or without momentum, needs less.",
        sharded(oom),
        another_gpu(oom),
    )


def _model_too_large(run: RunMeasurements, oom: OutOfMemory) -> Ruling | None:
    room, model = oom.room_bytes, oom.model
    if room is None:
        return None
    fixed = model.total_bytes or oom.begin_bytes or (oom.allocated_bytes or 0)
    if (fixed < _MODEL_SHARE * room or oom.begin_bytes is None) and oom.phase != SETUP:
        return None
    half = ""
    if is_32(run) and model.total_bytes:
        half = f", or precision='bf16-true' for half of it ({format_bytes(model.total_bytes / 2)})"
    parts = {
        "parameters": model.parameters_bytes,
        "gradients": model.gradients_bytes,
        "optimizer states": model.optimizer_bytes,
    }
    known = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return _ruling(
        oom,
        "model_too_large",
        f"The model takes {format_bytes(fixed)} before any batch, and torch can have {format_bytes(room)}: "
        f"{known or 'its parts are unknown'}.",
        sharded(oom) or f"It needs a GPU with more than {needed(oom)}{half}.",
        "Adapters or frozen layers need fewer gradients and states.",
        another_gpu(oom),
        fixed_bytes=fixed,
        largest_batch_size=0,
    )


def _batch_too_large(run: RunMeasurements, oom: OutOfMemory) -> Ruling | None:
    if base_phase(oom.phase) not in (TRAINING_STEP, VALIDATION, COPY):
        return None
    size, begin = samples(run, oom), oom.begin_bytes
    if size is None and not in_validation(oom) and run.loader is not None:
        size = run.loader.batch_size
    taken = None if oom.allocated_bytes is None or begin is None else oom.wanted_bytes - begin
    is_small = taken is not None and taken < max(_MIN_SHARE * (oom.room_bytes or 0), oom.kept_bytes)
    if is_small or _has_fitted(oom):
        return None
    batch = f"{'In validation, the' if in_validation(oom) else 'The'} batch{f' of {size}' if size else ''}"
    why = f"{batch} does not fit."
    if taken is not None and begin is not None:
        why = f"{batch} takes more than {format_bytes(taken)}, and {format_bytes(begin)} do not depend on it."
    fits = largest_that_fits(run, oom)
    return _ruling(
        oom,
        "batch_too_large",
        why,
        smaller_batch(run, oom, size, fits),
        levers(run, oom),
        another_gpu(oom),
        batch_size=size,
        batch_bytes=taken,
        largest_batch_size=fits.size,
    )


def _has_fitted(oom: OutOfMemory) -> bool:
    """Return whether batches of this size have fitted before, in much less memory."""
    if not oom.has_completed_steps or oom.memory is None or not oom.batch_shape or in_validation(oom):
        return False
    is_usual = math.prod(oom.batch_shape) <= (oom.usual_items or 0)
    return is_usual and oom.wanted_bytes > _NEARLY * oom.memory.peak_bytes


def _unexplained(run: RunMeasurements, oom: OutOfMemory) -> Ruling:
    free, requested = oom.free_bytes, oom.requested_bytes
    if free is not None and requested and free > requested and oom.message.allowed_bytes is None:
        why = "More was free than was asked for: another process held it a moment before, or a limit applies."
    elif _has_fitted(oom) and oom.memory is not None:
        why = f"Batches of this size fitted before, and no step took more than {format_bytes(oom.memory.peak_bytes)}."
    elif kept := oom.kept_bytes:
        why = f"When the step began, {format_bytes(kept)} were in tensors that are not the model's, and did not grow."
    else:
        why = f"What filled the memory is not known: it was full in {oom.place}."
    return _ruling(oom, "unexplained", why, record(run), another_gpu(oom))


def _host(run: RunMeasurements, oom: OutOfMemory) -> Ruling:
    message, loader = oom.message, run.loader
    fewer = ""
    if loader is not None and loader.num_workers:
        now = f"num_workers={loader.num_workers}, prefetch_factor={loader.prefetch_factor}"
        fewer = f"Fewer workers or prefetched batches need less (now {now})."
    pids = ", ".join(map(str, message.workers))
    if pids or oom.oom_kills:
        who = f"worker {pids} of the DataLoader" if pids else "a process of this job"
        why = f"The kernel killed {who}, because the memory of this machine or job was full."
    elif message.requested_bytes:
        available = format_bytes(run.host.memory_available_bytes)
        why = f"The host has {available} left, and {format_bytes(message.requested_bytes)} were asked for at once."
    else:
        why = "The memory of this machine or job is full."
    of_host = [growth for growth in oom.growth if growth.whose != "gpu"]
    if of_host:
        grown = growing_memory(of_host[0])
        return _ruling(oom, "memory_growth", why, grown.advice, fewer, **{**grown.evidence, "phase": oom.phase})
    return _ruling(
        oom,
        "unexplained",
        why,
        "Look for what holds it with smem or top, sorted by memory.",
        fewer,
        workers=pids or None,
        memory_available_bytes=run.host.memory_available_bytes,
    )


# The first one that applies is the verdict.
_RULES: tuple[Callable[[RunMeasurements, OutOfMemory], Ruling | None], ...] = (
    _loading_checkpoint,
    _spike,
    _other_processes,
    _evaluation,
    _memory_growth,
    _fragmentation,
    _optimizer_too_large,
    _model_too_large,
    _batch_too_large,
)
