"""Whether one run was faster or slower than another, beyond their own noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from lightning_gpu_tools.advice.noise import mean_interval, median_interval
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.reports.text import escape_markdown
from lightning_gpu_tools.units import format_duration, printable

# Settings that must match so that a difference in speed is due to the program.
_MUST_MATCH = (
    *("cpu", "gpu", "accelerator", "world_size", "precision", "batch_size", "accumulate_grad_batches"),
    *("num_workers", "prefetch_factor", "persistent_workers", "pin_memory"),
)

# With five blocks or fewer, not even their full range is a 95 % interval of the median.
_MIN_BLOCKS = 6

Verdict = Literal["faster", "same", "slower", "not_comparable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A setting that differs between two runs; ``None`` where a run lacks it."""

    setting: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{_show(self.old)} -> {_show(self.new)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What changed from an older run to a newer one; the times are ``None`` if a run has too few steady steps."""

    verdict: Verdict
    reasons: tuple[str, ...]  # why the runs cannot be compared
    of: str = "median"  # or "mean"
    old_step_s: float | None = None
    new_step_s: float | None = None
    slowdown: float | None = None  # 0.07 = a step takes 7 % longer
    slowdown_low: float | None = None  # of its 95 % interval
    slowdown_high: float | None = None
    max_slowdown: float  # the limit
    changes: tuple[Change, ...]


def compare(new: Report, old: Report, max_slowdown: float = 0.0) -> Comparison:
    """Compare two runs by the time of their steady steps: ``slower`` is beyond the noise and the limit (0.05 = 5 %)."""
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
    speed = _change_of_speed(old.step_s_blocks, new.step_s_blocks)
    verdict: Verdict = "same"
    if reasons:
        verdict = "not_comparable"
    elif speed["slowdown"] > max_slowdown and speed["slowdown_low"] > 0:
        verdict = "slower"
    elif speed["slowdown_high"] < 0:
        verdict = "faster"
    return Comparison(verdict=verdict, reasons=tuple(reasons), max_slowdown=max_slowdown, changes=changes, **speed)


def _change_of_speed(old: Sequence[float], new: Sequence[float]) -> dict[str, Any]:
    """Return what a comparison says of the mean step if its change is beyond the noise, else of the median step.

    A few steps that became slow change only the mean, and a single accident makes only the mean uncertain.
    """
    found: dict[str, Any] = {}
    for of, typical, interval in (("mean", fmean, mean_interval), ("median", median, median_interval)):
        old_interval, new_interval = interval(old), interval(new)
        if old_interval is None or new_interval is None:
            break
        found = {
            "of": of,
            "old_step_s": typical(old),
            "new_step_s": typical(new),
            "slowdown": typical(new) / typical(old) - 1,
            "slowdown_low": new_interval[0] / old_interval[1] - 1,
            "slowdown_high": new_interval[1] / old_interval[0] - 1,
        }
        if not found["slowdown_low"] <= 0 <= found["slowdown_high"]:
            break
    return found


def _show(value: Any) -> str:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return printable(", ".join(map(printable, values)), 300) or "None"


def render_comparison(comparison: Comparison) -> str:
    """Return the comparison as text."""
    return "\n".join([f"{_verdict(comparison)}: {_numbers(comparison)}", *_details(comparison)])


def comparison_markdown(comparison: Comparison) -> str:
    """Return the comparison for a pull request."""
    lines = [f"**{_verdict(comparison)}:** {_numbers(comparison)}", ""]
    return "\n".join([*lines, *(f"- {escape_markdown(line)}" for line in _details(comparison))]).rstrip()


def _verdict(comparison: Comparison) -> str:
    return "NO SLOWER" if comparison.verdict == "same" else comparison.verdict.replace("_", " ").upper()


def _numbers(comparison: Comparison) -> str:
    old_s, new_s = comparison.old_step_s, comparison.new_step_s
    slowdown, low, high = comparison.slowdown, comparison.slowdown_low, comparison.slowdown_high
    if old_s is None or new_s is None or slowdown is None or low is None or high is None:
        return "there are no steady steps to compare."
    noise = ", within the noise of the runs" if low <= 0 <= high else ""
    limit = f"; the limit is {100 * comparison.max_slowdown:+.1f} %" if comparison.max_slowdown else ""
    interval = f"95 % interval {100 * low:+.1f} to {100 * high:+.1f} %"
    steps = f"{format_duration(old_s)} per {comparison.of} step before, {format_duration(new_s)} now"
    return f"{steps}: {100 * slowdown:+.1f} % ({interval}){noise}{limit}."


def _details(comparison: Comparison) -> list[str]:
    return [
        *(f"Not comparable: {reason}." for reason in comparison.reasons),
        *(f"Changed: {printable(one.setting)}: {one}" for one in comparison.changes),
    ]
