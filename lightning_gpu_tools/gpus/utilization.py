"""Arithmetic on the driver's utilization samples. Standard library only, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_gpu_tools.gpus.readings import UtilizationSample

# What one sample stands for at most; nvml.h, nvmlUtilization_t: "between 1 second and 1/6 second, depending on the
# product". Beyond it nothing is known.
LONGEST_PERIOD_S = 1.0


def weights_s(samples: Sequence[UtilizationSample], previous_s: float | None = None) -> list[float]:
    """Return the seconds that each of the samples, oldest first, stands for; without ``previous_s`` two are alike."""
    if not samples:
        return []
    times = [sample.time_s for sample in samples]
    if previous_s is None:
        previous_s = times[0] - (times[1] - times[0] if len(times) > 1 else LONGEST_PERIOD_S)
    periods = [end - begin for begin, end in zip([previous_s, *times], times, strict=False)]
    return [min(max(period, 0.0), LONGEST_PERIOD_S) for period in periods]


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float | None:
    """Return the mean of the values by weight; ``None`` if there is nothing to average."""
    total = math.fsum(weights)
    if total <= 0:
        return None
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def mean_percent(samples: Sequence[UtilizationSample]) -> float | None:
    """Return the time-weighted mean of the samples, oldest first; ``None`` without any."""
    return weighted_mean([sample.percent for sample in samples], weights_s(samples))
