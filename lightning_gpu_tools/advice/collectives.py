"""The collective in which ranks wait for each other, and the ranks that have not called it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_gpu_tools.training.phases import RANK_WAIT, base_phase
from lightning_gpu_tools.training.stall_facts import Frame, GroupCalls, RankFacts
from lightning_gpu_tools.units import number_ranges, printable

SAME_BATCHES = (
    "Give every rank the same number of batches: DistributedSampler(dataset, drop_last=True), or "
    "Trainer(limit_train_batches=...). Shard an IterableDataset by rank."
)
# The files of torch's collectives.
_FILES = tuple(
    f"torch/distributed/{name}.py" for name in ("distributed_c10d", "c10d_logger", "_functional_collectives")
)


def collective_of(stack: Sequence[Frame], phase: str, groups: Sequence[GroupCalls]) -> str | None:
    """Return the collective in which a rank waits for others, from torch's record or its stack; ``None`` if in none.

    On a GPU, a stack does not show it: the thread waits where it reads the result. In backward, a stack does not show
    whether a rank waits.
    """
    for group in groups:
        for call in group.calls:
            if not call.is_done:
                return call.text
    functions = [frame.function for frame in stack if frame.file.endswith(_FILES) and frame.function != "wrapper"]
    if functions:
        return functions[-1]
    is_in_backward = any(frame.function == "_engine_run_backward" for frame in stack[-2:])
    return "backward" if (is_in_backward or base_phase(phase) == RANK_WAIT) and not groups else None


class HangingCall(NamedTuple):
    """The first collective of a process group that does not complete, or that differs between ranks."""

    number: int  # in its group
    group: str  # its description; empty for the default group
    calls: Mapping[int, str]  # by rank
    missing: Sequence[int]  # ranks that have not called it

    @property
    def differs(self) -> bool:
        """Whether ranks have called different collectives, or passed different sizes."""
        return len({*self.calls.values()}) > 1

    def __str__(self) -> str:
        group = f" of group {printable(self.group)}" if self.group else ""
        parts = []
        for text in dict.fromkeys(self.calls.values()):
            ranks = [rank for rank, call in self.calls.items() if call == text]
            parts.append(f"{name_ranks(ranks)} called {printable(text)}")
        if self.missing:
            parts.append(f"{name_ranks(self.missing)} did not call it")
        return f"Collective no. {self.number:,}{group}: {'; '.join(parts)}."


def hanging_call(ranks: Sequence[RankFacts]) -> HangingCall | None:
    """Return the collective that blocks the ranks, from torch's record; ``None`` if the record has none.

    A collective that differs between ranks comes first, then one that is missing on a rank that waits in no other.
    """
    waiting = {rank.rank for rank in ranks if rank.waits_in is not None}
    groups = sorted({group.group for rank in ranks for group in rank.groups})
    calls = [call for call in (_hanging_call_of(group, ranks) for group in groups) if call is not None]
    return min(calls, key=lambda call: (not call.differs, waiting.issuperset(call.missing)), default=None)


def _hanging_call_of(name: str, ranks: Sequence[RankFacts]) -> HangingCall | None:
    groups = {rank.rank: group for rank in ranks for group in rank.groups if group.group == name}
    called = {rank: {call.number: call for call in groups[rank].calls} for rank in sorted(groups)}
    description = min(group.description for group in groups.values())
    for number in sorted({number for numbers in called.values() for number in numbers}):
        calls = {rank: numbers[number] for rank, numbers in called.items() if number in numbers}
        texts = {rank: call.text for rank, call in calls.items()}
        if len({*texts.values()}) == 1 and all(call.is_done for call in calls.values()):
            continue
        members = called if description else sorted(rank.rank for rank in ranks if rank.groups)
        # Of calls that are done, a record has only the last ones.
        missing = [rank for rank in members if max(called.get(rank, ()), default=0) < number]
        return HangingCall(number, description, texts, missing)
    return None


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as words: ``"ranks 0, 1 and 3"``."""
    ranks = sorted(ranks)
    return f"rank{'s' * (len(ranks) > 1)} {number_ranges(ranks)}"
