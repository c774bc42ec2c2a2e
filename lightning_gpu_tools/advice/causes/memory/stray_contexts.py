"""stray_contexts: ranks of this job also hold CUDA contexts on GPUs that are not theirs.

Every rank asks the driver on which GPUs its process holds memory: before training, after the first step, and about once
a minute. Without an out-of-memory error it is also a finding, but does not change the verdict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_gpu_tools.advice.examples import FLAT, GIB, failed
from lightning_gpu_tools.advice.findings import Cause, Finding, new_finding
from lightning_gpu_tools.advice.out_of_memory import MemoryFacts, needed_bytes
from lightning_gpu_tools.training.run_measurements import HeldContext, RunMeasurements
from lightning_gpu_tools.units import format_bytes, number_ranges

# Our default: on a GPU where no rank trains, a process with more than this in torch's allocator uses it on purpose.
_MAX_RESERVED = 32 * 2**20


def strays(contexts: Sequence[HeldContext]) -> list[list[HeldContext]]:
    """Return the contexts on GPUs that are not their rank's, by GPU: those with most memory first."""
    trained_on = {context.uuid for context in contexts if context.is_own}
    of_gpus: defaultdict[str, list[HeldContext]] = defaultdict(list)
    for context in contexts:
        if not context.is_own and (context.uuid in trained_on or context.reserved_bytes <= _MAX_RESERVED):
            of_gpus[context.uuid].append(context)
    return sorted(of_gpus.values(), key=lambda those: (-_size(those), those[0].node, those[0].gpu))


def find_early(run: RunMeasurements) -> Iterator[Finding]:
    """Yield a finding on the GPU with most of this memory, if there is any."""
    for those in strays(run.contexts)[:1]:
        is_alone = len({context.rank for context in run.contexts}) == 1
        own = [str(context.gpu) for context in run.contexts if context.is_own] if is_alone else []
        found = _finding(those, who="This process" if is_alone else "", own=own[0] if own else "local_rank")
        yield replace(found, advice=f"{found.why} {found.advice}")


def find(facts: MemoryFacts) -> Iterator[Finding]:
    run, oom = facts
    here = [context for those in strays(run.contexts) for context in those if context.uuid == oom.uuid]
    if not here or oom.total_bytes is None or oom.allowed_bytes is not None:
        return
    # If a size was known, PIDs are the driver's, which may have a newer size, read after the error.
    listed = {process.pid: process.memory_used_bytes for process in oom.others}
    here = [
        replace(context, held_bytes=context.held_bytes and listed.get(context.pid, context.held_bytes))
        for context in here
    ]
    size, free = _size(here), oom.free_bytes or 0
    needed = needed_bytes(oom) - _size(context for context in here if context.pid not in listed)
    if size and oom.requested_bytes <= free + size and needed <= oom.total_bytes:
        yield _finding(here)


def _size(those: Iterable[HeldContext]) -> int:
    return sum(context.held_bytes or 0 for context in those)


def _finding(those: Sequence[HeldContext], *, who: str = "", own: str = "local_rank") -> Finding:
    """Return the finding that these contexts are on a GPU that is not their rank's; ``own`` is the one to set."""
    many, size, gpu = len(those) > 1, _size(those), those[0].gpu
    ranks = number_ranges(context.rank for context in those)
    who = who or f"Rank{'s' * many} {ranks}"
    what = format_bytes(size) if size else "CUDA contexts" if many else "a CUDA context"
    return new_finding(
        f"{who} hold{'s' * (not many)} {what} on GPU {gpu}, which is not {'their' if many else 'its'} GPU.",
        [
            f"Call torch.cuda.set_device({own}) before anything else uses CUDA. Avoid 'cuda:0' and torch.load without "
            "map_location, which use another GPU."
        ],
        {"gpu": gpu, "node": those[0].node, "ranks": ranks, "held_bytes": size or None},
    )


_OWN = [HeldContext(rank=rank, node=0, pid=40 + rank, gpu=rank, uuid=f"GPU-{rank}", is_own=True) for rank in range(4)]
_STRAY = [replace(context, gpu=0, uuid="GPU-0", is_own=False, held_bytes=GIB // 2) for context in _OWN[1:]]

CAUSE = Cause(
    says="Rank ... holds ... on GPU ..., which is not its GPU; also reported, without a change of the "
    "verdict, if no error occurred",
    change="`torch.cuda.set_device(local_rank)` before anything else uses CUDA, `map_location` in `torch.load`",
    find=find,
    find_early=find_early,
    verified_on="simulated GPU",
    sick=failed(begins=FLAT, contexts=(*_OWN, *_STRAY)),
    healthy=failed(begins=FLAT, contexts=tuple(_OWN)),
)
