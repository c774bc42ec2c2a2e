"""A quantity over time, in a bounded number of points. Standard library only, no clock."""

from __future__ import annotations

import math


class Timeline:
    """A quantity over time in a bounded number of points: when they are used up, two neighbors become one."""

    def __init__(self, max_points: int, width_s: float) -> None:
        self._max_points = max_points
        self._width_s = width_s
        self._origin_s: float | None = None
        self._points: dict[int, tuple[float, float]] = {}  # number of the interval -> value x weight, weight

    def add(self, time_s: float, value: float, weight: float = 1.0) -> None:
        """Add a value; within one point the values are averaged by weight."""
        if self._origin_s is None:
            self._origin_s = time_s
        number = math.floor((time_s - self._origin_s) / self._width_s)
        total, total_weight = self._points.get(number, (0.0, 0.0))
        self._points[number] = total + value * weight, total_weight + weight
        while len(self._points) > self._max_points:
            self._width_s *= 2
            points, self._points = self._points, {}
            for number, (total, total_weight) in points.items():
                merged, merged_weight = self._points.get(number // 2, (0.0, 0.0))
                self._points[number // 2] = merged + total, merged_weight + total_weight

    def points(self) -> list[tuple[float, float]]:
        """Return (seconds since the epoch, mean), oldest first; the time is the middle of the point's interval."""
        return [
            ((self._origin_s or 0.0) + (number + 0.5) * self._width_s, total / weight)
            for number, (total, weight) in sorted(self._points.items())
            if weight > 0
        ]
