"""Whether one run was faster or slower than another, beyond their own noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from lightning_gpu_tools.advice.noise import mean_interval, median_interval
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.reports.text import escape_markdown
from lightning_gpu_tools.units import format_duration, printable

# What must match so that a difference in speed is due to the program, by its name in Report.settings.
_MUST_MATCH = (
    *("cpu", "gpu", "accelerator", "world_size", "precision", "batch_size", "accumulate_grad_batches"),
    *("num_workers", "prefetch_factor", "persistent_workers", "pin_memory"),
)

# With five blocks or fewer, not even their full range is a 95 % interval of the median.
_MIN_BLOCKS = 6

Verdict = Literal["faster", "same", "slower", "not_comparable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A setting that differs between two runs; ``None`` if a run does not have it."""

    setting: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{_show(self.old)} -> {_show(self.new)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What changed from an older run to a newer one.

    Attributes:
        verdict: ``slower`` or ``faster`` only if the difference exceeds the noise and, if slower, the limit.
        reasons: Why the runs cannot be compared; empty if they can.
        of: Which step is compared: the mean one if it has changed beyond the noise, otherwise the median one.
        old_step_s: Its time in the older run; ``None``, as the next four, if a run has too few steady steps.
        new_step_s: The same for the newer run.
        slowdown: How much longer a step takes now: 0.07 = 7 % longer; negative = faster.
        slowdown_low: Lower end of its 95 % interval.
        slowdown_high: Upper end.
        max_slowdown: The limit.
        changes: The settings that differ.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    of: Literal["mean", "median"] = "median"
    old_step_s: float | None = None
    new_step_s: float | None = None
    slowdown: float | None = None
    slowdown_low: float | None = None
    slowdown_high: float | None = None
    max_slowdown: float
    changes: tuple[Change, ...]


def compare(new: Report, old: Report, max_slowdown: float = 0.0) -> Comparison:
    """Compare two runs by the median and the mean time of their steady steps.

    Args:
        new: The run in question.
        old: The run to compare it with.
        max_slowdown: How much slower the new run may be: 0.05 = 5 %.
    """
    names = sorted({*new.settings, *old.settings})
    changes = tuple(
        Change(setting=name, old=old.settings.get(name), new=new.settings.get(name))
        for name in names
        if old.settings.get(name) != new.settings.get(name)
    )
    reasons = [
        f"{change.setting} differs: {_show(change.old)} before, {_show(change.new)} now"
        for change in changes
        if change.setting in _MUST_MATCH
    ]
    for name, report in (("old", old), ("new", new)):
        if len(report.step_s_blocks) < _MIN_BLOCKS:
            reasons.append(
                f"the {name} run is too short: it has {len(report.step_s_blocks)} blocks of steady steps, and at least "
                f"{_MIN_BLOCKS} are needed to estimate its noise"
            )
    change = change_of_speed(old.step_s_blocks, new.step_s_blocks)
    verdict: Verdict = "same"
    if reasons or change is None:
        verdict = "not_comparable"
    elif change.slowdown > max_slowdown and change.slowdown_low > 0:
        verdict = "slower"
    elif change.slowdown_high < 0:
        verdict = "faster"
    return Comparison(
        verdict=verdict,
        reasons=tuple(reasons),
        max_slowdown=max_slowdown,
        changes=changes,
        **({} if change is None else change._asdict()),
    )


class SpeedChange(NamedTuple):
    """What a :class:`Comparison` says of the time of a step."""

    of: Literal["mean", "median"]
    old_step_s: float
    new_step_s: float
    slowdown: float
    slowdown_low: float
    slowdown_high: float


def change_of_speed(old: Sequence[float], new: Sequence[float]) -> SpeedChange | None:
    """Return how much longer the mean step takes now if that is beyond the noise, otherwise the median step.

    A few steps that became slow change only the mean, and a single accident makes only the mean uncertain. ``None``
    with too few values.
    """
    by_mean = _change("mean", fmean, mean_interval, old, new)
    if by_mean is not None and by_mean.slowdown_low <= 0 <= by_mean.slowdown_high:
        return _change("median", median, median_interval, old, new)
    return by_mean


def _change(
    of: Literal["mean", "median"],
    typical: Callable[[Sequence[float]], float],
    interval: Callable[[Sequence[float]], tuple[float, float] | None],
    old: Sequence[float],
    new: Sequence[float],
) -> SpeedChange | None:
    old_interval, new_interval = interval(old), interval(new)
    if old_interval is None or new_interval is None:
        return None
    return SpeedChange(
        of=of,
        old_step_s=typical(old),
        new_step_s=typical(new),
        slowdown=typical(new) / typical(old) - 1,
        slowdown_low=new_interval[0] / old_interval[1] - 1,
        slowdown_high=new_interval[1] / old_interval[0] - 1,
    )


def _show(value: Any) -> str:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return printable(", ".join(map(printable, values)), 300) or "None"


_SAYS = {
    "faster": "FASTER",
    "same": "NO SLOWER",
    "slower": "SLOWER",
    "not_comparable": "NOT COMPARABLE",
}


def render_comparison(comparison: Comparison) -> str:
    """Return the comparison as text."""
    return "\n".join([f"{_SAYS[comparison.verdict]}: {_numbers(comparison)}", *_details(comparison)])


def comparison_markdown(comparison: Comparison) -> str:
    """Return the comparison for a pull request."""
    lines = [f"**{_SAYS[comparison.verdict]}:** {_numbers(comparison)}", ""]
    return "\n".join([*lines, *(f"- {escape_markdown(line)}" for line in _details(comparison))]).rstrip()


def _numbers(comparison: Comparison) -> str:
    old_s, new_s = comparison.old_step_s, comparison.new_step_s
    if old_s is None or new_s is None:
        return "there are no steady steps to compare."
    steps = f"{format_duration(old_s)} per {comparison.of} step before, {format_duration(new_s)} now"
    slowdown, low, high = comparison.slowdown, comparison.slowdown_low, comparison.slowdown_high
    if slowdown is None or low is None or high is None:
        return steps + "."
    noise = ", within the noise of the runs" if low <= 0 <= high else ""
    limit = f"; the limit is {100 * comparison.max_slowdown:+.1f} %" if comparison.max_slowdown else ""
    interval = f"95 % interval {100 * low:+.1f} to {100 * high:+.1f} %"
    return f"{steps}: {100 * slowdown:+.1f} % ({interval}){noise}{limit}."


def _details(comparison: Comparison) -> list[str]:
    return [
        *(f"Not comparable: {reason}." for reason in comparison.reasons),
        *(f"Changed: {printable(one.setting)}: {one}" for one in comparison.changes),
    ]
