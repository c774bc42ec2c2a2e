"""Whether memory grows steadily, and when it will not fit any more. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

# Our defaults.
_PARTS = 8  # of a run, whose medians all have to rise; by chance those of 1 run in 8! = 40320 do
_WARM_UP_SHARE = 0.2  # left out: caches, workers and the allocator fill up
_MIN_POINTS_PER_PART = 3
_MIN_GROWTH_BYTES = 64 * 2**20
# What levels off grows less in the second half: a square root gains 0.7 as much there.
_MIN_SECOND_HALF = 0.8

# In tensors on the GPU when steps begin; of the training process on the host; of the loader's workers together beyond
# what they share.
Whose = Literal["gpu", "process", "workers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGrowth:
    """Memory that grew steadily over a run."""

    whose: Whose
    bytes_per_s: float
    grown_bytes: float  # after the first fifth of the run
    left_s: float | None = None  # until the memory is full at this rate; None if the limit is unknown
    phase: Literal["training", "validation"] | None = None  # where most of it grew


def steady_growth(whose: Whose, points: Sequence[tuple[float, float]], room_bytes: float | None) -> MemoryGrowth | None:
    """Return how memory grew by (seconds, bytes), oldest first; ``None`` if not steadily to the end, or too few points.

    ``room_bytes`` more would fit; ``None`` = unknown.
    """
    if not points:
        return None
    first_s, last_s = points[0][0], points[-1][0]
    begin_s = first_s + _WARM_UP_SHARE * (last_s - first_s)
    part_s = (last_s - begin_s) / _PARTS
    if part_s <= 0:
        return None
    parts: list[list[tuple[float, float]]] = [[] for _ in range(_PARTS)]
    for time_s, size in points:
        if time_s >= begin_s:
            parts[min(int((time_s - begin_s) / part_s), _PARTS - 1)].append((time_s, size))
    if min(map(len, parts)) < _MIN_POINTS_PER_PART:
        return None
    times = [median(time_s for time_s, _ in part) for part in parts]
    sizes = [median(size for _, size in part) for part in parts]
    middle = _PARTS // 2
    first_half, second_half = sizes[middle - 1] - sizes[0], sizes[-1] - sizes[middle]
    rises = all(after > before for before, after in itertools.pairwise(sizes))
    if not rises or sizes[-1] - sizes[0] < _MIN_GROWTH_BYTES or second_half < _MIN_SECOND_HALF * first_half:
        return None
    slope = median((sizes[j] - sizes[i]) / (times[j] - times[i]) for i in range(_PARTS) for j in range(i + 1, _PARTS))
    left_s = None if room_bytes is None else max(0.0, room_bytes) / slope
    return MemoryGrowth(whose=whose, bytes_per_s=slope, grown_bytes=sizes[-1] - sizes[0], left_s=left_s)
