"""The times that ranks work and wait. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median_low

from lightning_gpu_tools.training.run_measurements import RankStep

PARTS_OF_STEP = {"forward": "its forward pass", "backward": "its backward pass", "optimizer": "its optimizer's step"}


def slowest_rank(ranks: Sequence[RankStep]) -> tuple[RankStep, float] | None:
    """Return the rank that works longest on a step, and how many seconds longer than the median rank.

    With an even number of ranks, the median is the faster of the two in the middle. ``None`` with one rank.
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


def mean_wait_s(ranks: Sequence[RankStep]) -> float | None:
    """Return the mean time that a rank waits for others in a step; ``None`` if unknown."""
    waits = [rank.wait_s for rank in ranks if rank.wait_s is not None]
    return fmean(waits) if waits and len(waits) == len(ranks) else None


def waits_for_cores_of_others_s(ranks: Sequence[RankStep]) -> list[float]:
    """Return the time that each rank waits in a step for others without a core: at most as long as those wait.

    It is 0 if the waiting time of a rank is unknown, as on a GPU.
    """
    total_s = sum(rank.core_wait_s for rank in ranks)
    return [min(rank.wait_s or 0.0, total_s - rank.core_wait_s) for rank in ranks]
