"""Whether one run was faster or slower than another one, beyond their own noise. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from lightning_gpu_tools.reports.report import Report, as_json
from lightning_gpu_tools.reports.text import escape_markdown
from lightning_gpu_tools.units import format_duration, printable

# What must be alike so that a difference in speed is one of the program, by its name in Report.settings.
_MUST_MATCH = {
    "cpu": "CPU",
    "gpu": "GPU",
    "accelerator": "accelerator",
    "world_size": "world size",
    "precision": "precision",
    "batch_size": "batch size",
    "accumulate_grad_batches": "accumulate_grad_batches",
    "num_workers": "loader's num_workers",
    "prefetch_factor": "loader's prefetch_factor",
    "persistent_workers": "loader's persistent_workers",
    "pin_memory": "loader's pin_memory",
}

# With five blocks or fewer not even the range from the least to the greatest is a 95 % interval of the median.
_MIN_BLOCKS = 6

Verdict = Literal["faster", "same", "slower", "not_comparable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A setting that differs between two runs; ``None`` = the run does not have it."""

    setting: str
    old: Any
    new: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What changed from an older run to a newer one.

    Attributes:
        verdict: ``slower`` and ``faster`` only where the difference is more than noise and more than was allowed.
        reasons: Why the runs cannot be compared; empty if they can.
        old_step_s: Median time of a steady step of the older run; ``None`` if it has none.
        new_step_s: The same of the newer one.
        slowdown: How much longer a step takes now: 0.07 = 7 % longer; negative = faster. ``None`` if unknown.
        slowdown_low: Lower end of its interval, which holds it with at least 95 % confidence.
        slowdown_high: Upper end.
        max_slowdown: How much was allowed.
        changes: The settings that differ.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    old_step_s: float | None
    new_step_s: float | None
    slowdown: float | None
    slowdown_low: float | None
    slowdown_high: float | None
    max_slowdown: float
    changes: tuple[Change, ...]


def compare(new: Report, old: Report, max_slowdown: float = 0.0) -> Comparison:
    """Compare two runs by the median time of their steady steps.

    Args:
        new: The run in question.
        old: What it is measured by.
        max_slowdown: How much slower a run may be: 0.05 = 5 %.
    """
    names = sorted({*new.settings, *old.settings})
    changes = tuple(
        Change(setting=name, old=old.settings.get(name), new=new.settings.get(name))
        for name in names
        if old.settings.get(name) != new.settings.get(name)
    )
    reasons = [
        f"the {_MUST_MATCH[change.setting]} differs: {show_setting(change.old)} before, {show_setting(change.new)} now"
        for change in changes
        if change.setting in _MUST_MATCH
    ]
    for name, report in (("old", old), ("new", new)):
        if len(report.step_s_blocks) < _MIN_BLOCKS:
            reasons.append(
                f"the {name} run is too short: {len(report.step_s_blocks)} blocks of steady steps, of at least "
                f"{_MIN_BLOCKS} that are needed to know its noise"
            )
    slowdown = low = high = None
    old_interval, new_interval = median_interval(old.step_s_blocks), median_interval(new.step_s_blocks)
    if old_interval and new_interval:
        slowdown = median(new.step_s_blocks) / median(old.step_s_blocks) - 1
        low, high = new_interval[0] / old_interval[1] - 1, new_interval[1] / old_interval[0] - 1
    return Comparison(
        verdict=_verdict(bool(reasons), slowdown, low, high, max_slowdown),
        reasons=tuple(reasons),
        old_step_s=median(old.step_s_blocks) if old.step_s_blocks else None,
        new_step_s=median(new.step_s_blocks) if new.step_s_blocks else None,
        slowdown=slowdown,
        slowdown_low=low,
        slowdown_high=high,
        max_slowdown=max_slowdown,
        changes=changes,
    )


def _verdict(
    has_reasons: bool, slowdown: float | None, low: float | None, high: float | None, max_slowdown: float
) -> Verdict:
    if has_reasons or slowdown is None or low is None or high is None:
        return "not_comparable"
    if slowdown > max_slowdown and low > 0:
        return "slower"
    return "faster" if high < 0 else "same"


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that holds the median with at least 95 % confidence, ``None`` for fewer than six values.

    Distribution-free: between the k-th value from below and from above, where a fair coin tossed once a value shows
    heads fewer than k times in at most 2.5 % of cases.
    """
    count = len(values)
    rank, ways, ways_below = 0, 1, 1  # binomial coefficients, in integers: a power of two has no float for long
    while rank < count and 40 * ways_below <= 2**count:
        ways = ways * (count - rank) // (rank + 1)
        ways_below += ways
        rank += 1
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


def show_setting(value: Any) -> str:
    """Return a setting in words."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    return printable(", ".join(map(printable, values)), 300) or "none"


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


def comparison_json(comparison: Comparison) -> str:
    """Return the comparison as JSON text."""
    return as_json(asdict(comparison))


def _numbers(comparison: Comparison) -> str:
    old_s, new_s = comparison.old_step_s, comparison.new_step_s
    if old_s is None or new_s is None:
        return "there are no steady steps to compare."
    steps = f"a step took {format_duration(old_s)} and now takes {format_duration(new_s)}"
    if comparison.slowdown is None or comparison.slowdown_low is None or comparison.slowdown_high is None:
        return steps + "."
    low, high = 100 * comparison.slowdown_low, 100 * comparison.slowdown_high
    noise = "; that is within the noise of the runs" if low <= 0 <= high else ""
    change = f"{100 * comparison.slowdown:+.1f} % (95 % interval {low:+.1f} to {high:+.1f} %){noise}"
    allowed = f"; allowed {100 * comparison.max_slowdown:+.1f} %" if comparison.max_slowdown else ""
    return f"{steps}: {change}{allowed}."


def _details(comparison: Comparison) -> list[str]:
    lines = [f"Not comparable: {reason}." for reason in comparison.reasons]
    lines += [
        f"Changed: {printable(one.setting)}: {show_setting(one.old)} -> {show_setting(one.new)}"
        for one in comparison.changes
    ]
    return lines
