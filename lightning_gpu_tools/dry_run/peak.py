"""The peak of GPU memory in a recording: the blocks in use and their purposes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import accumulate
from typing import NamedTuple

from lightning_gpu_tools.memory.readings import Block, Stack

# Functions of torch in which the training thread runs backward, and in which backward recomputes activations.
_BACKWARD = ("_engine_run_backward", "unpack_hook")
# The outermost function of a thread that Python started. Backward's own threads have none of them.
_OUTERMOST = ("<module>", "_run_module_as_main", "_bootstrap")
_DDP_FILE = "torch/nn/parallel/distributed.py"


class Peak(NamedTuple):
    """The moment with the most memory in use."""

    size: int  # requested bytes
    blocks: Mapping[int, Block]  # blocks in use, by address
    old: Set[int]  # addresses of the blocks that existed at the beginning
    kept: Set[int]  # addresses of the blocks that still exist at the end
    reached_by: Block | None  # last allocated block; None if the peak is at the beginning


def phase_of(stack: Stack) -> str:
    """Return the phase of a step that allocated memory with this stack: forward, backward or optimizer.

    Backward runs in its own threads, in which Python is called only for hooks, functions and operators that are written
    in Python. Lightning runs forward within the optimizer's ``step``, so the innermost of the two decides.
    """
    if not stack or stack[-1]["name"] not in _OUTERMOST or any(frame["name"] in _BACKWARD for frame in stack):
        return "backward"
    for frame in stack:
        file = frame["filename"]
        if "/torch/optim/" in file:
            return "optimizer"
        if "/torch/" not in file:
            break
    return "forward"


def find_peak(before: Mapping[int, Block], events: Sequence[Block]) -> Peak:
    """Return the peak of these events, given the blocks in use before them."""
    sizes = list(accumulate((event.size for event in events), initial=sum(block.size for block in before.values())))
    place = max(range(len(sizes)), key=sizes.__getitem__)
    live, at_peak, reached_by = dict(before), dict(before), None
    for number, event in enumerate(events, 1):
        if event.size > 0:
            live[event.address] = event._replace(phase=phase_of(event.stack))
        else:
            live.pop(event.address, None)
        if number == place:
            at_peak, reached_by = dict(live), live.get(event.address)
    old = {address for address, block in at_peak.items() if before.get(address) is block}
    kept = {address for address, block in at_peak.items() if live.get(address) is block}
    return Peak(sizes[place], at_peak, old, kept, reached_by)


def parts_at(
    peak: Peak, names_before: Mapping[int, str], names_after: Mapping[int, str], workspace_sizes: Set[int]
) -> Counter[str]:
    """Return the memory in use at a peak by part, in bytes; the parts are named as in ``memory_account.PARTS``.

    ``names_before`` and ``names_after`` map addresses of known tensors to parts, at the beginning and at the end.
    """
    parts: Counter[str] = Counter()
    for address, block in peak.blocks.items():
        is_old = address in peak.old
        name = (is_old and names_before.get(address)) or (address in peak.kept and names_after.get(address))
        if not name and address in peak.kept and block.size in workspace_sizes:
            name = "workspaces"
        if not name and block.stack and block.stack[0]["filename"].endswith(_DDP_FILE):
            name = "gradient_buckets"
        parts[name or ("other_tensors" if is_old else "activations")] += block.size
    return parts


def ends_of(events: Sequence[Block]) -> tuple[int, int]:
    """Return the numbers of a step's allocations up to the end of forward, and of backward."""
    phases = [phase_of(event.stack) for event in events if event.size > 0]
    end = len(phases)
    before_backward = phases.index("backward") if "backward" in phases else end
    of_optimizer = (number for number in range(before_backward, end) if phases[number] == "optimizer")
    return before_backward, next(of_optimizer, end)
