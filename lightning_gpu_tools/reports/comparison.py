"""Whether a run was faster or slower than another beyond their noise, and what following its advice has brought."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from lightning_gpu_tools.advice.findings import mean_interval, median_interval
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.reports.report import FILE_NAME, PREVIOUS_NAME, Report, load_report
from lightning_gpu_tools.reports.text import cause_phase, escape_markdown, phase_label
from lightning_gpu_tools.training.phases import PAUSES, RANK_WAIT, base_phase
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


# Settings that advice changes; all others must match.
_ADVISED = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "precision", "batch_size")
_SAME_PROGRAM = ("model", "dataset")
_CHANGED = 0.5  # our default: a phase counts as changed if it takes less than half as long


def is_of_one_run(folder: Path) -> bool:
    """Return whether the next run has another folder, as Lightning's loggers name them."""
    return folder.name.startswith("version_")


def earlier_report(folder: str | Path) -> Report | None:
    """Return the last finished report of the folder, or else the newest one of the logger's other versions."""
    here = Path(folder)
    others = [file for file in here.parent.glob(f"version_*/{FILE_NAME}") if is_of_one_run(here) and file.exists()]
    others.sort(key=os.path.getmtime, reverse=True)
    for file in (here / FILE_NAME, here / PREVIOUS_NAME, *others):
        with contextlib.suppress(ReportError):  # none there, of a newer version, or not ours: nothing to compare with
            report = load_report(file)
            if report.is_finished:
                return report
    return None


def confirm(new: Report, old: Report) -> str | None:
    """Return the result of following the older run's advice; ``None`` if it was not followed or cannot be measured."""
    if not old.diagnosis.findings or any(new.settings.get(name) != old.settings.get(name) for name in _SAME_PROGRAM):
        return None
    advised = [change for change in compare(new, old).changes if change.setting in _ADVISED]
    aligned = _by_sample(old, {**old.settings, **{change.setting: change.new for change in advised}})
    # How much longer the older run's steps take is how much faster the newer one is.
    change = compare(aligned, _by_sample(new, new.settings))
    speedup, low, high = change.slowdown, change.slowdown_low, change.slowdown_high
    if change.verdict == "not_comparable" or speedup is None or low is None or high is None:
        return None
    phase = cause_phase(old)
    took_less = phase is not None and _phase_per_step(phase, new) < _CHANGED * _phase_per_step(phase, old)
    if phase in PAUSES:  # no part of a steady step, so only the whole run shows it
        if not took_less or not new.wall_s:
            return None
        speedup = (old.wall_s / max(1, old.steps)) / (new.wall_s / max(1, new.steps)) - 1
        return f"{_phase_change(phase, new, old)}: {_faster(speedup)}, measured over the whole run."
    if advised:
        what = ", ".join(f"{change.setting} {change}" for change in advised)
    elif phase is not None and took_less:
        what = _phase_change(phase, new, old)
    else:
        return None
    verdict = ", not confirmed: it is within the noise of the runs."
    if low > 0:
        verdict = ", confirmed."
    elif high < 0:
        verdict = ". Undo the change."
    return f"{what}: {_faster(speedup)} (95 % interval {100 * low:+.0f} to {100 * high:+.0f} %){verdict}"


def _faster(speedup: float) -> str:
    return f"{100 * abs(speedup):.0f} % {'slower' if speedup < 0 else 'faster'}"


def _by_sample(report: Report, settings: Mapping[str, Any]) -> Report:
    """Return the report with other settings, and with the time of steps per sample if the batch size is known."""
    size = report.settings.get("batch_size")
    samples = size if isinstance(size, int) and size > 0 else 1
    return replace(report, settings=settings, step_s_blocks=tuple(step_s / samples for step_s in report.step_s_blocks))


def _phase_per_step(phase: str, report: Report) -> float:
    # Waiting for other ranks is only booked in parts, by what it held up.
    parts = [name for name in report.phase_s if name == phase or base_phase(name) == phase == RANK_WAIT]
    return sum(report.phase_s[name] for name in parts) / max(1, report.steps)


def _phase_change(phase: str, new: Report, old: Report) -> str:
    group, _, name = phase.partition("/")
    before, now = (format_duration(_phase_per_step(phase, report)) for report in (old, new))
    return f"{printable(name) or phase_label(group)} {before} -> {now} per step"
