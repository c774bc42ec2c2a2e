"""Detects a steady rise over a run, as opposed to noise, a jump, or a slow beginning. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, combinations
from statistics import fmean, median
from typing import NamedTuple

# Our defaults.
_MIN_LATE = 0.25  # of the rise of medians from the first to the last third of a run: the part after the second third
_LOWEST = 0.75  # of the lowest value: a line through an accelerating curve would begin below 0
_DEVIATIONS = 1.96  # of a normal distribution, on either side of its 95 % interval
_MIN_SCORE = 1.645  # in standard deviations: of values in random order, 5 % have a higher score


class Line(NamedTuple):
    """A straight line through values, from the first to the last of them."""

    first: float
    last: float
    added: float  # mean of its rise above the first

    @property
    def times(self) -> float:
        """The last over the first."""
        return self.last / self.first


class SteadyRise(NamedTuple):
    """A steady rise, with the lines at the ends of its 95 % interval."""

    line: Line
    lower: Line
    upper: Line


def steady_rise(values: Sequence[float]) -> SteadyRise | None:
    """Return the rise of positive values that rise throughout; ``None`` if they do not.

    A straight line must fit their ranks better than any two jumps do. The line is the Theil-Sen estimator, and its
    interval comes from Kendall's rank correlation. It assumes no distribution and is robust against single long steps.
    """
    count, third = len(values), len(values) // 3
    if third < 2:
        return None
    early, middle, late = map(median, (values[:third], values[third:-third], values[-third:]))
    if late - middle < _MIN_LATE * (late - early) or not _are_like_a_line(values):
        return None
    slopes = _slopes(values)
    outside = (len(slopes) - _DEVIATIONS * _deviation(count)) / 2
    lower, upper = max(0, round(outside)), min(len(slopes) - 1, round(len(slopes) - outside))
    return SteadyRise(*(_line(values, slope) for slope in (median(slopes), slopes[lower], slopes[upper])))


def slope(values: Sequence[float]) -> float:
    """Return the slope of the Theil-Sen line from each value to the next."""
    return median(_slopes(values))


def rise(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the medians of the first and the last third of a quantity that rises over a run; ``None`` otherwise.

    ``points`` are pairs of a step and a value, in order.
    """
    values = [value for _, value in points]
    third = len(values) // 3
    if third < 1 or _score(values) < _MIN_SCORE:
        return None
    return median(values[:third]), median(values[-third:])


def _are_like_a_line(values: Sequence[float]) -> bool:
    """Return whether a rising line explains more of the values' ranks than the two best jumps do."""
    count = len(values)
    ranks = [sum((other < one) - (other > one) for other in values) for one in values]  # around 0
    places = [place - (count - 1) / 2 for place in range(count)]
    along = sum(place * rank for place, rank in zip(places, ranks, strict=True))
    by_line = along**2 / sum(place**2 for place in places)
    sums = [0, *accumulate(ranks)]
    by_jumps = max(
        sums[first] ** 2 / first
        + (sums[second] - sums[first]) ** 2 / (second - first)
        + sums[second] ** 2 / (count - second)
        for first, second in combinations(range(1, count), 2)
    )
    return along > 0 and by_line > by_jumps


def _slopes(values: Sequence[float]) -> list[float]:
    return sorted((later - one) / (j - i) for (i, one), (j, later) in combinations(enumerate(values), 2))


def _line(values: Sequence[float], slope: float) -> Line:
    begin = median(value - slope * place for place, value in enumerate(values))
    first = max(begin, _LOWEST * min(values))
    return Line(
        first=first,
        last=max(first, begin + slope * (len(values) - 1)),
        added=fmean(max(0.0, begin + slope * place - first) for place in range(len(values))),
    )


def _score(values: Sequence[float]) -> float:
    """Return Kendall's score of a rise, in standard deviations of values in random order."""
    concordance = sum((later > one) - (later < one) for one, later in combinations(values, 2))
    return concordance / _deviation(len(values))


def _deviation(count: int) -> float:
    return math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
