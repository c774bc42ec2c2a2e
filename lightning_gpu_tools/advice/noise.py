"""How well a median or a mean is known from a few measurements."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that holds the median with at least 95 % confidence; ``None`` for fewer than six values.

    From the k-th smallest to the k-th largest, where so many tosses of a coin rarely (2.5 %) show fewer than k heads.
    """
    count = len(values)
    rank, ways_below = 0, 1
    while rank < count and 40 * ways_below <= 2**count:
        rank += 1
        ways_below += math.comb(count, rank)
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that holds the mean with some 95 % confidence; ``None`` for fewer than six values.

    By the bootstrap. A single value is missing from every third draw, so one accident does not move the lower end.
    """
    if len(values) < 6:
        return None
    draw = random.Random(0)
    means = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(1000))
    return means[24], means[974]
