"""memory_growth: something keeps more memory with each step, or with each validation batch.

The memory in tensors at the start of each step, or of each validation batch, grows in all parts of the run. The memory
of the training process and of the DataLoader's workers is tracked as well. Growth is reported before memory is full.
"""

import itertools
from collections.abc import Sequence
from statistics import median

from lightning_gpu_tools.advice.findings import Cause, Finding, Findings, holding, new_finding
from lightning_gpu_tools.advice.out_of_memory import MIN_SHARE, ErrorFacts, fewer_workers, why_host_is_full
from lightning_gpu_tools.memory.readings import MemoryGrowth, MemoryLine
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes, format_duration, printable

# Memory grows if the medians of four consecutive parts of the run rise. By chance they do in 1 of 4! = 24 runs.
_PARTS = 4
_WHOSE = {
    "gpu": "GPU memory in tensors between steps",
    "process": "Memory of the training process",
    "workers": "Memory of the DataLoader's workers",
}
_IN_LISTS = (
    "Find what is kept from step to step: losses and outputs in lists (keep loss.item() or loss.detach()), caches, "
)
_KEPT = {
    "gpu": _IN_LISTS + "metrics that are never reset.",
    "process": _IN_LISTS + "figures and loggers that are never closed.",
    # https://github.com/pytorch/pytorch/issues/13246: reading an object writes its reference count, so the kernel
    # copies its page.
    "workers": (
        "A worker copies each Python object of the dataset that it reads. Keep file names and labels in arrays (numpy, "
        "torch, pyarrow), not in lists or dicts. Caches in the dataset also grow in each worker."
    ),
}
_KEPT_BY_DATASET = "Limit the size of {}, or keep nothing in it."
_MIN_EXPLAINED = 0.5  # our default: an attribute of the dataset is named if it explains so much of the growth
_OF_PREDICTIONS = (
    "Trainer.predict keeps all outputs: pass return_predictions=False, and write them in a BasePredictionWriter."
)


def find(facts: ErrorFacts) -> Findings:
    run, oom = facts
    if oom.source == "host":
        for growth in [growth for growth in run.growth if growth.whose != "gpu"][:1]:
            yield new_finding(why_host_is_full(oom), _growing(growth, run).advice, fewer_workers(run))
        return
    kept = "" if oom.grad_enabled else kept_in_validation(facts)
    if kept:
        advice = "Reduce outputs to numbers in each validation batch, or move kept tensors to the CPU (.cpu())."
        yield new_finding(f"{kept}, because something keeps its outputs.{left(oom.lines)}", advice)
    growth_of_steps = _growth(oom.begins, facts)
    if growth_of_steps is not None:
        per_step, since, total = growth_of_steps
        why = (
            f"Memory kept from step to step has grown by {format_bytes(per_step)} per step since step {since:.0f}, "
            f"{format_bytes(total)} in total.{left(oom.lines)}"
        )
        yield new_finding(why, _KEPT["gpu"])


def find_early(run: RunMeasurements) -> Findings:
    for growth in run.growth:
        yield _growing(growth, run)


def kept_in_validation(facts: ErrorFacts) -> str:
    """Return the beginning of a sentence on what each validation batch keeps; empty if the error is not due to it."""
    grown = _growth(facts.oom.validation_begins, facts) if facts.in_validation else None
    if grown is None:
        return ""
    per_batch, _, total = grown
    return f"Each validation batch keeps {format_bytes(per_batch)} on the GPU, {format_bytes(total)} so far"


def left(lines: Sequence[MemoryLine]) -> str:
    """Return a sentence, after a space, about the lines that allocated what is left."""
    found = holding(lines)
    return f" The recorded part of it was allocated at {found}." if found else ""


def _growth(points: Sequence[tuple[float, float]], facts: ErrorFacts) -> tuple[float, float, float] | None:
    """Return bytes per step, the first such step, and the total; ``None`` if growth is not steady, or not a cause."""
    points = [point for point in points if point[0] > 1]  # the first step creates the optimizer's states
    if len(points) < _PARTS or facts.room_bytes is None:
        return None
    bounds = [round(i * len(points) / _PARTS) for i in range(_PARTS + 1)]
    parts = [points[begin:end] for begin, end in itertools.pairwise(bounds)]
    sizes = [median(size for _, size in part) for part in parts]
    total = points[-1][1] - min(size for _, size in points)
    if sorted(set(sizes)) != sizes or total < max(MIN_SHARE * facts.room_bytes, facts.oom.requested_bytes):
        return None
    last, last_size = points[-1]
    since, size = max(point for point in points if point[1] <= last_size - 0.95 * total)
    return (last_size - size) / (last - since), since, total


def _growing(growth: MemoryGrowth, run: RunMeasurements) -> Finding:
    # Lines whose blocks on the GPU were still in use some steps later.
    lines = run.memory.kept_lines if run.memory is not None and growth.whose == "gpu" else ()
    advice = _KEPT[growth.whose]
    if run.stage == "predict" and growth.whose == "process":
        advice = _OF_PREDICTIONS
    end = "" if growth.left_s is None else f"; at this rate it is full in {format_duration(growth.left_s)}"
    rate = format_bytes(growth.bytes_per_s * 60)
    why = f"{_WHOSE[growth.whose]} grows steadily, by {rate} per minute{end}.{left(lines)}"
    evidence: dict[str, float | str | None] = {"source_lines": holding(lines)}
    # An attribute of the dataset is named if it explains most of the growth of the host's memory.
    sizes = {
        attribute: attribute.now_bytes - attribute.before_bytes
        for attribute in run.dataset_growth
        if growth.whose == ("process" if attribute.worker is None else "workers")
    }
    grown = max(sizes, key=sizes.__getitem__, default=None)
    total = sum(size for attribute, size in sizes.items() if grown is not None and attribute.name == grown.name)
    if grown is not None and total >= _MIN_EXPLAINED * growth.grown_bytes:
        name, where = printable(grown.name), "" if grown.worker is None else f" in worker {grown.worker}"
        why += (
            f" {name} grew from {format_bytes(grown.before_bytes)} to {format_bytes(grown.now_bytes)} "
            f"({grown.entries:,} entries){where}."
        )
        advice = _KEPT_BY_DATASET.format(name)
        evidence |= {"attribute": name, "attribute_bytes": grown.now_bytes}
    return new_finding(why, why, advice, **evidence)


CAUSE = Cause(
    says="Memory kept from step to step has grown by ... per step since step ...; each validation batch keeps ...",
    change="`loss.item()` or `.detach()` for kept tensors, `.cpu()` for outputs",
    find=find,
    is_on_host=True,
    find_early=find_early,
    verified_on="hardware",
)
