"""Why memory has run out: the causes of an out-of-memory error, with the numbers of the run. Pure; bytes throughout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import median

from lightning_gpu_tools.advice.findings import Evidence, Finding, counted
from lightning_gpu_tools.advice.memory_account import KEPT, growing_memory
from lightning_gpu_tools.advice.memory_remedies import (
    another_gpu,
    in_validation,
    is_32,
    largest_that_fits,
    levers,
    needed,
    needed_bytes,
    record,
    samples,
    sharded,
    smaller_batch,
)
from lightning_gpu_tools.advice.out_of_memory import LOADING_CHECKPOINT, SETUP, OutOfMemory
from lightning_gpu_tools.gpus.readings import GpuProcess
from lightning_gpu_tools.training.phases import OPTIMIZER, TRAINING_STEP, VALIDATION, base_phase
from lightning_gpu_tools.training.run_measurements import COPY, RunMeasurements
from lightning_gpu_tools.units import format_bytes, printable

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


def _ruling(oom: OutOfMemory, cause: str, why: str, *advice: str, **evidence: float | str | None) -> Ruling:
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
    cause: str = "evaluation_graph" if oom.grad_enabled else "memory_growth"
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
        why_no_largest_batch_size=fits.why_not or None,
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
