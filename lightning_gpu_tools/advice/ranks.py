"""The times in which ranks work and wait. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, median_low
from typing import Any

from lightning_gpu_tools.gpus.readings import not_none
from lightning_gpu_tools.training.run_measurements import RankStep

_USUAL = 0.9  # our default: the share of sampled steps that count, shortest first
_MIN_SAMPLES = 5  # our default: steps that all ranks have sampled
PARTS_OF_STEP = {"forward": "its forward pass", "backward": "its backward pass", "optimizer": "its optimizer's step"}


def slowest_rank(ranks: Sequence[RankStep]) -> tuple[RankStep, float] | None:
    """Return the rank that works longest on a step, and its seconds beyond the median rank; ``None`` with one rank.

    With an even number of ranks, the median is the faster of the two in the middle.
    """
    if len(ranks) < 2:
        return None
    own_s = own_work_s(ranks)
    slowest = max(range(len(ranks)), key=own_s.__getitem__)
    return ranks[slowest], own_s[slowest] - median_low(own_s)


def own_work_s(ranks: Sequence[RankStep]) -> list[float]:
    """Return the time of each rank's own work on a step, without parts that only some ranks report."""
    unknown = unknown_parts(ranks)
    return [rank.own_step_s - sum(rank.phase_s.get(part, 0.0) for part in unknown) for rank in ranks]


def unknown_parts(ranks: Sequence[RankStep]) -> list[str]:
    """Return the parts of a step that only some ranks report."""
    knowing = {part: sum(part in rank.phase_s for rank in ranks) for part in PARTS_OF_STEP}
    return [part for part, count in knowing.items() if 0 < count < len(ranks)]


def usual_s(sampled_s: Iterable[float]) -> float:
    """Return the mean of sampled steps without the longest 10%, because one outlier distorts the mean of a few."""
    seconds = sorted(sampled_s)
    return fmean(seconds[: math.ceil(_USUAL * len(seconds))])


def waited_s(rank: RankStep) -> float | None:
    """Return the time that a rank waits in a step for later ranks; ``None`` if unknown."""
    return rank.wait_s if rank.others_late_s is None else rank.others_late_s


def mean_wait_s(ranks: Sequence[RankStep]) -> float | None:
    """Return the mean time of a rank in collectives in a step; ``None`` if unknown."""
    waits = [rank.wait_s for rank in ranks if rank.wait_s is not None]
    return fmean(waits) if waits and len(waits) == len(ranks) else None


def with_waits(ranks: tuple[RankStep, ...], waits: Mapping[int, Mapping[str, Any]]) -> tuple[RankStep, ...]:
    """Add the waits of GPUs for other ranks, from each rank's ``RunRecorder.own_waits``."""
    of_ranks = [waits[rank.rank] for rank in ranks]
    if all(rank.wait_s is not None for rank in ranks) or not all(of_ranks):
        return ranks
    # Both are lower bounds: sampled steps may miss rare waits, and hosts wait for the rank that is last on average.
    hosts_s = [waits_of_rank["of_host_s"] for waits_of_rank in of_ranks]
    late_s: list[float | None] = [None] * len(ranks)
    if any(hosts_s):  # a host also waits for its own GPU's work, which is not waiting for others
        rooms_s = [
            waits_of_rank["step_s"] - rank.own_step_s for rank, waits_of_rank in zip(ranks, of_ranks, strict=True)
        ]
        late_s = [max(0.0, min(s - min(hosts_s), room_s)) for s, room_s in zip(hosts_s, rooms_s, strict=True)]
    sending_s = None
    steps = set.intersection(*(set(waits_of_rank["by_step"]) for waits_of_rank in of_ranks))
    if len(steps) >= _MIN_SAMPLES:
        least_s = {step: min(waits_of_rank["by_step"][step] for waits_of_rank in of_ranks) for step in steps}
        sending_s = median(least_s.values())
        sampled_s = [
            usual_s(waits_of_rank["by_step"][step] - least_s[step] for step in steps) for waits_of_rank in of_ranks
        ]
        late_s = [max(not_none([one_s, two_s])) for one_s, two_s in zip(late_s, sampled_s, strict=True)]
    return tuple(
        replace(rank, others_late_s=one_s, wait_s=None if sending_s is None or one_s is None else sending_s + one_s)
        for rank, one_s in zip(ranks, late_s, strict=True)
    )
