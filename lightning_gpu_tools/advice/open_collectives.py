"""The collective that does not complete: the ranks that have called it, those that have not, and differing calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_gpu_tools.advice.collectives import BACKWARD_SYNC
from lightning_gpu_tools.training.stall_facts import Collective, GroupCalls, RankFacts
from lightning_gpu_tools.units import number_ranges, printable

# Collectives to which each rank passes the same number of elements, by torch.distributed's documentation.
_EQUAL_SIZES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
_DEFAULT_GROUP = "default_pg"  # torch's description of it
_MAX_PARTS = 4  # of a sentence, our default


class OpenCollective(NamedTuple):
    """The first collective of a process group that does not complete, or that differs between ranks."""

    group: GroupCalls  # of one of its ranks
    number: int
    calls: Mapping[int, Collective]  # by rank
    missing: Mapping[int, int]  # the last number of each rank that has not called it; 0 if unknown
    are_several: bool  # whether there are calls in several groups

    @property
    def differs(self) -> bool:
        """Whether ranks have called different collectives."""
        return len({_kind(call) for call in self.calls.values()}) > 1

    @property
    def odd(self) -> int | None:
        """The rank whose call is the rarest; ``None`` if no call is rarer than the others."""
        counts = Counter(map(_kind, self.calls.values()))
        (fewest, count), *others = sorted(counts.items(), key=lambda one: one[1])
        if not others or count == others[0][1]:
            return None
        return min(rank for rank, call in self.calls.items() if _kind(call) == fewest)


def open_collective(ranks: Sequence[RankFacts]) -> OpenCollective | None:
    """Return the collective that blocks the ranks, from torch's record; ``None`` if the record has none.

    A collective that differs between ranks comes first, then one missing on a rank that waits in no other.
    """
    recorded = {one.rank: one for one in ranks if one.groups}
    waiting = {rank for rank, one in recorded.items() if any(group.first_open for group in one.groups)}
    names = sorted({group.group for one in recorded.values() for group in one.groups})
    found = [one for name in names if (one := _open_in(name, recorded, len(names) > 1)) is not None]
    return min(
        found,
        key=lambda one: (
            not one.differs,
            all(rank in waiting for rank in one.missing),
            not one.missing,
            -len(one.calls),
        ),
        default=None,
    )


def _open_in(name: str, recorded: Mapping[int, RankFacts], are_several: bool) -> OpenCollective | None:
    groups = {rank: group for rank, one in recorded.items() for group in one.groups if group.group == name}
    called = {rank: {call.number: call for call in groups[rank].calls} for rank in sorted(groups)}
    numbers = sorted({call.number for group in groups.values() if (call := group.first_open) is not None})
    if not numbers:
        return None
    every = sorted({number for of_rank in called.values() for number in of_rank})
    first = next((number for number in every if _differ(called, number)), numbers[0])
    calls = {rank: of_rank[first] for rank, of_rank in called.items() if first in of_rank}
    members = {rank for group in groups.values() for rank in group.ranks} or groups
    last = {rank: max(called.get(rank, ()), default=0) for rank in sorted(members) if rank in recorded}
    missing = {rank: number for rank, number in last.items() if number < first}
    return OpenCollective(groups[min(calls)], first, calls, missing, are_several)


def _differ(called: Mapping[int, Mapping[int, Collective]], number: int) -> bool:
    return len({_kind(of_rank[number]) for of_rank in called.values() if number in of_rank}) > 1


def _kind(call: Collective) -> tuple[str, int | None, str]:
    """Return the properties that have to be the same on all ranks."""
    return (call.operation, call.size, call.dtype) if call.operation in _EQUAL_SIZES else (call.operation, None, "")


def with_open_calls(ranks: Sequence[RankFacts], held_up: OpenCollective | None) -> list[RankFacts]:
    """Return the ranks with the collectives in which they wait, from torch's record; ranks without the open one first.

    On a GPU, a stack does not show a collective: the thread waits where it reads the result. In backward, a stack does
    not show whether a rank waits.
    """
    known, missing = [], () if held_up is None else held_up.missing
    for one in ranks:
        waits_in = waits_of(one, with_size=False)  # which may differ between ranks that wait for each other
        if one.collective is None and waits_in is not None:
            one = replace(one, collective=waits_in)
        elif one.collective == BACKWARD_SYNC and waits_in is None and one.rank in missing:
            one = replace(one, collective=None)
        known.append(one)
    return sorted(known, key=lambda one: (one.rank not in missing, one.rank))


def waits_of(one: RankFacts, *, with_size: bool = True) -> str | None:
    """Return the first collective of a rank that has not completed: ``"all_reduce no. 4 of 7 float32 numbers"``.

    With several groups, the text includes the group.
    """
    found = next(((group, call) for group in one.groups if (call := group.first_open) is not None), None)
    if found is None:
        return None
    group, call = found
    name = _name(call if with_size else call._replace(size=None), f" no. {call.number:,}")
    return name + (f" in {_group(group)}" if len(one.groups) > 1 else "")


def sentence(held_up: OpenCollective, ranks: Sequence[RankFacts]) -> str:
    """Return a sentence on the ranks that wait for the open collective, where, and those that have not called it."""
    # NCCL calls are asynchronous, so the thread may be elsewhere by now.
    is_at_call = not held_up.differs or held_up.group.group.startswith("gloo ")
    lines = {one.rank: one.line if is_at_call else "" for one in ranks}
    verb = "call" if held_up.differs else "wait for"
    parts = []
    calls = {rank: call for rank, call in held_up.calls.items() if held_up.differs or not call.is_done}
    for kind in dict.fromkeys(map(_kind, calls.values())):
        same = [rank for rank, call in calls.items() if _kind(call) == kind]
        call = _name(calls[same[0]], "" if held_up.differs else f" no. {held_up.number:,}")
        parts.append(f"{_who(same)} {_of(verb, same)} {call}{lines[same[0]]}")
    waits = {one.rank: waits_of(one) for one in ranks}
    for last, waits_for in sorted({(last, waits[rank] or "") for rank, last in held_up.missing.items()}):
        same = [rank for rank in held_up.missing if (held_up.missing[rank], waits[rank] or "") == (last, waits_for)]
        called = f"called only {last:,}" if last else "not called it"
        instead = f" and {_of('wait for', same)} {waits_for}" if waits_for else ""
        parts.append(f"{_who(same)} {'has' if len(same) == 1 else 'have'} {called}{instead}")
    shown = "; ".join(parts[:_MAX_PARTS]) + (f"; and {len(parts) - _MAX_PARTS} more" if parts[_MAX_PARTS:] else "")
    where = f"as no. {held_up.number:,}" if held_up.differs else ""
    if held_up.are_several:
        where = f"{where} in {_group(held_up.group)}".strip()
    whole = f"{where}, {shown}" if where else shown
    return f"{whole[0].upper()}{whole[1:]}."


def _group(group: GroupCalls) -> str:
    if group.description == _DEFAULT_GROUP:
        return "the default group"
    ranks = f" of ranks {number_ranges(group.ranks)}" if group.ranks else ""
    return f"group {printable(group.description)}{ranks}"


def _name(call: Collective, number: str) -> str:
    words = printable(call.operation) + number
    if call.size is None:
        return words
    return f"{words} of {call.size:,} {printable(call.dtype)} number{'s' * (call.size != 1)}"


def _who(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {number_ranges(ranks)}"


def _of(verb: str, ranks: Sequence[int]) -> str:
    first, *rest = verb.split()
    return " ".join([first + "s" * (len(ranks) == 1), *rest])
