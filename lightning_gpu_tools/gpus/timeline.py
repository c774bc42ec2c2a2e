"""A quantity over time, in a bounded number of points. Pure functions and data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True, slots=True)
class Series:
    """A quantity over time, as means over intervals of equal length.

    Attributes:
        begin_s: Start of the first interval, in seconds since training started.
        interval_s: Length of each interval.
        values: Mean in each interval, in order; ``None`` where nothing was reported.
    """

    begin_s: float
    interval_s: Annotated[float, Meta(ge=1e-9)]
    values: Sequence[float | None]

    def points(self) -> list[tuple[float, float]]:
        """Return pairs of (middle of an interval, mean) where a value was reported, oldest first."""
        return [
            (self.begin_s + (number + 0.5) * self.interval_s, value)
            for number, value in enumerate(self.values)
            if value is not None
        ]

    def at_most(self, count: int) -> Series:
        """Return the series in at most ``count`` intervals, made longer by a power of two."""
        interval_s, values = self.interval_s, self.values
        while len(values) > count:
            pairs = [[value for value in values[i : i + 2] if value is not None] for i in range(0, len(values), 2)]
            interval_s, values = 2 * interval_s, [sum(pair) / len(pair) if pair else None for pair in pairs]
        return Series(self.begin_s, interval_s, values)


class Timeline:
    """A quantity over time in a bounded number of intervals. At the limit, neighboring intervals are merged in pairs.

    Intervals are ``width_s`` long at first and begin at the time of the first value.
    """

    def __init__(self, max_points: int, width_s: float) -> None:
        self._max_points = max_points
        self._width_s = width_s
        self._origin_s: float | None = None
        # By interval: the sum of values times weights, and the sum of weights.
        self._totals: list[float] = []
        self._weights: list[float] = []

    def add(self, time_s: float, value: float, weight: float = 1.0) -> None:
        """Add a value. Values within an interval are averaged by weight."""
        if self._origin_s is None:
            self._origin_s = time_s
        number = max(0, math.floor((time_s - self._origin_s) / self._width_s))
        while number >= self._max_points:
            number //= 2
            self._width_s *= 2
            self._totals = _in_pairs(self._totals)
            self._weights = _in_pairs(self._weights)
        missing = [0.0] * (number + 1 - len(self._totals))
        self._totals += missing
        self._weights += missing
        self._totals[number] += value * weight
        self._weights[number] += weight

    def series(self) -> Series:
        """Return the mean of every interval."""
        sums = zip(self._totals, self._weights, strict=True)
        means = [total / weight if weight > 0 else None for total, weight in sums]
        return Series(self._origin_s or 0.0, self._width_s, means)

    def points(self) -> list[tuple[float, float]]:
        """Return the points of the series."""
        return self.series().points()


def _in_pairs(sums: Sequence[float]) -> list[float]:
    return [sum(sums[i : i + 2]) for i in range(0, len(sums), 2)]
