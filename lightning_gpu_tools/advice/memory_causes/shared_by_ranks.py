"""shared_by_ranks: other ranks of this job train on the same GPU and hold the memory that this rank lacks.

Compares the driver's list of processes with the PIDs of this job's ranks. Without the other ranks on this GPU, the
allocation would fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_gpu_tools.advice.cause import MemoryCause, Ruling
from lightning_gpu_tools.advice.memory_causes.other_processes import named
from lightning_gpu_tools.advice.memory_causes.stray_contexts import strays
from lightning_gpu_tools.advice.memory_examples import FLAT, GIB, an_error
from lightning_gpu_tools.advice.memory_remedies import needed_bytes
from lightning_gpu_tools.advice.out_of_memory import MIN_SHARE, OutOfMemory
from lightning_gpu_tools.gpus.readings import GpuProcess, GpuReading
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.units import format_bytes

_MAX_NAMED = 3  # our default: processes in the report


def find(run: RunMeasurements, oom: OutOfMemory) -> Iterator[Ruling]:
    here, size, free = oom.siblings, oom.siblings_bytes, oom.free_bytes or 0
    total, strangers = oom.total_bytes, {one.pid for those in strays(oom.contexts) for one in those}
    if total is None or oom.message.allowed_bytes is not None or strangers & {one.pid for one in here}:
        return
    if size < MIN_SHARE * total or oom.requested_bytes > free + size or needed_bytes(oom) > total:
        return
    ranks = len(here) + 1
    if len(oom.gpus) > 1:
        advice = (
            "Give each rank its own GPU: call torch.cuda.set_device(local_rank) before anything else uses CUDA, and "
            "list as many GPUs in CUDA_VISIBLE_DEVICES as this machine has ranks."
        )
    else:
        more = f", and accumulate gradients over {ranks} times as many batches" if run.stage == "fit" else ""
        advice = f"This machine has one GPU: start one rank{more}."
    yield Ruling(
        f"{ranks} ranks of this job share this GPU: {named(here[:_MAX_NAMED])}. Without the others, "
        f"{format_bytes(free + size)} would be free.",
        [advice],
        {"pids": " ".join(str(one.pid) for one in here), "siblings_bytes": size},
    )


_SHARED: dict[str, Any] = {
    "allocated": 11 * GIB,
    "pid": 40,
    "gpus": (
        GpuReading(
            index=0,
            uuid="GPU-0",
            memory_total_bytes=24 * GIB,
            memory_free_bytes=0,
            processes=tuple(GpuProcess(pid=pid, memory_used_bytes=12 * GIB) for pid in (40, 41)),
        ),
    ),
}

CAUSE = MemoryCause(
    says="... ranks of this job share this GPU, with the memory that each of them holds",
    change="`torch.cuda.set_device(local_rank)`, and as many GPUs in `CUDA_VISIBLE_DEVICES` as there are ranks; on a "
    "machine with one GPU, one rank",
    find=find,
    after=("stray_contexts",),
    verified_on="simulated GPU",
    sick=an_error(begins=FLAT, **_SHARED, own_pids=frozenset({40, 41})),
    healthy=an_error(begins=FLAT, **_SHARED, own_pids=frozenset({40})),
)
