"""The comparison of two runs: whether one is slower beyond the noise, and the effect of following advice."""

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from lightning_gpu_tools.advice.causes import MEMORY_CAUSES, TIME_CAUSES
from lightning_gpu_tools.advice.findings import LOADER_SETTINGS, label_of, mean_interval, median_interval
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.files import last_modified, matching
from lightning_gpu_tools.reports.report import FILE_NAME, PREVIOUS_NAME, Report, load_report, run_folder
from lightning_gpu_tools.training.phases import PAUSES, TRAINING_STEP
from lightning_gpu_tools.units import format_duration, printable, wrapped

# Settings that must match so that a difference in speed is due to the program.
_MUST_MATCH = (
    *("stage", "cpu", "gpu", "accelerator", "world_size", "precision", "batch_size", "accumulate_grad_batches"),
    *LOADER_SETTINGS,
)
_SAME_PROGRAM = ("model", "dataset", "stage")
_SETTINGS = {
    **{name: cause.settings for name, cause in MEMORY_CAUSES.items()},
    **{name: cause.settings for name, cause in TIME_CAUSES.items()},
}
# The phases that a setting cannot speed up, with one rank. Several ranks wait for each other in their steps.
_UNTOUCHED: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(LOADER_SETTINGS, frozenset({TRAINING_STEP, "callback", "logging", "trainer"})),
    "precision": frozenset({"data_loading", "callback", "logging", "trainer"}),
}

# With five blocks or fewer, not even their full range is a 95% interval of the median.
_MIN_BLOCKS = 6
_MAX_ELSEWHERE = 0.5  # our default: if a larger part of the gain is in other phases, the change does not explain it

Verdict = Literal["faster", "same", "slower", "not_comparable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A setting that differs between two runs; ``None`` where a run lacks it."""

    setting: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{printable(self.setting)} {_show(self.old)} -> {_show(self.new)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The change from an older run to a newer one; times are ``None`` if a run has too few steady steps."""

    verdict: Verdict
    reasons: tuple[str, ...]  # the reasons why the runs cannot be compared
    of: str = "median"  # or "mean"
    per: str = "step"  # or "sample", after an advised change of the batch size
    old_step_s: float | None = None
    new_step_s: float | None = None
    slowdown: float | None = None  # 0.07 = a step takes 7% longer
    slowdown_low: float | None = None  # of its 95% interval
    slowdown_high: float | None = None
    max_slowdown: float  # the limit
    changes: tuple[Change, ...]  # of all settings
    followed: tuple[Change, ...] = ()  # of the settings in the older run's advice, which the runs test
    doubt: str | None = None  # the reason why the gain is not due to them


def compare(new: Report, old: Report, max_slowdown: float = 0.0) -> Comparison:
    """Compare two runs by the time of their steady steps: ``slower`` means beyond the noise and the limit (0.05 = 5%).

    Settings in the older run's advice may differ: the comparison then shows the effect of following it.
    """
    names = sorted({*new.settings, *old.settings})
    changes = tuple(
        Change(setting=name, old=old.settings.get(name), new=new.settings.get(name))
        for name in names
        if old.settings.get(name) != new.settings.get(name)
    )
    is_same_program = all(new.settings.get(name) == old.settings.get(name) for name in _SAME_PROGRAM)
    findings = old.diagnosis.findings if is_same_program else ()
    advised: set[str] = set()
    for finding in findings:  # only if the advice names a setting: some of it is about other things
        settings = _SETTINGS.get(finding.cause, ())
        advised.update(settings if any(name in finding.advice for name in settings) else ())
    followed = tuple(change for change in changes if change.setting in advised)
    reasons = [
        f"{change.setting} differs: {_show(change.old)} before, {_show(change.new)} now"
        for change in changes
        if change.setting in _MUST_MATCH and change not in followed
    ]
    per_sample = any(change.setting == "batch_size" for change in followed)
    blocks = []
    for name, report in (("old", old), ("new", new)):
        if (count := len(report.step_s_blocks)) < _MIN_BLOCKS:
            has = f"has {count} blocks of steady steps, but an estimate of its noise needs {_MIN_BLOCKS}"
            reasons.append(f"the {name} run is too short: it {has}")
        size = report.settings.get("batch_size")
        samples = size if per_sample and isinstance(size, int) and size > 0 else 1
        blocks.append([step_s / samples for step_s in report.step_s_blocks])
    speed = _change_of_speed(*blocks)
    verdict: Verdict = "same"
    if reasons:
        verdict = "not_comparable"
    elif speed["slowdown"] > max_slowdown and speed["slowdown_low"] > 0:
        verdict = "slower"
    elif speed["slowdown_high"] < 0:
        verdict = "faster"
    return Comparison(
        verdict=verdict,
        reasons=tuple(reasons),
        per="sample" if per_sample else "step",
        max_slowdown=max_slowdown,
        changes=changes,
        followed=followed,
        doubt=_doubt(new, old, followed) if followed and verdict == "faster" else None,
        **speed,
    )


def _change_of_speed(old: Sequence[float], new: Sequence[float]) -> dict[str, Any]:
    """Return the change of the mean step if it is beyond the noise, otherwise that of the median step.

    A few slow steps change only the mean. A single outlier makes only the mean uncertain.
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


def _doubt(new: Report, old: Report, followed: Sequence[Change]) -> str | None:
    """Return why a gain is not due to the changes, if most of it is in phases that they cannot speed up."""
    if new.settings.get("world_size", 1) != 1:
        return None
    untouched = frozenset.intersection(*(_UNTOUCHED.get(change.setting, frozenset()) for change in followed))
    before, now = _steady_phase_s(old), _steady_phase_s(new)
    gains = {phase: before.get(phase, 0.0) - now.get(phase, 0.0) for phase in {*before, *now} - {*PAUSES}}
    whole, elsewhere = sum(gains.values()), sum(gain for phase, gain in gains.items() if phase in untouched)
    if whole <= 0 or elsewhere <= _MAX_ELSEWHERE * whole:
        return None
    phase = max(untouched, key=lambda name: gains.get(name, 0.0))
    times = f"{format_duration(before.get(phase, 0.0))} -> {format_duration(now.get(phase, 0.0))} per step"
    return (
        f"the machine was not the same: {100 * min(elsewhere / whole, 1.0):.0f}% of the gain is in phases that this "
        f'change cannot speed up, mostly in "{label_of(phase)}" ({times})'
    )


def _steady_phase_s(report: Report) -> dict[str, float]:
    """Return the mean time per step of each group of phases, without the warm-up."""
    done, steps, spent_s = 0, 0, defaultdict[str, float](float)
    for span in report.spans:
        done += span.steps
        if done > report.warm_up_steps:
            steps += span.steps
            for phase, seconds in span.phase_s.items():
                spent_s[phase] += seconds
    return {phase: seconds / max(1, steps) for phase, seconds in spent_s.items()}


def _show(value: Any) -> str:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return printable(", ".join(map(printable, values)), 300) or "None"


def render_comparison(comparison: Comparison) -> str:
    """Return the comparison as text, as wide as the terminal."""
    is_test = comparison.verdict != "not_comparable"
    named = {change.setting for change in comparison.followed} if is_test else {*_MUST_MATCH}
    lines = [
        headline(comparison),
        *(f"Not comparable: {reason}." for reason in comparison.reasons),
        *(f"Changed as advised: {change}." for change in comparison.followed if not is_test),
        *(f"Changed: {change}." for change in comparison.changes if change.setting not in named),
    ]
    return "\n".join(map(wrapped, lines))


def headline(comparison: Comparison) -> str:
    """Return the result in one line: of the tested change, or of the two runs."""
    verdict = "NO SLOWER" if comparison.verdict == "same" else comparison.verdict.replace("_", " ").upper()
    old_s, new_s = comparison.old_step_s, comparison.new_step_s
    slowdown, low, high = comparison.slowdown, comparison.slowdown_low, comparison.slowdown_high
    if old_s is None or new_s is None or slowdown is None or low is None or high is None:
        return f"{verdict}: there are no steady steps to compare."
    noise = ", within the noise of the runs" if low <= 0 <= high else ""
    limit = (
        f"; the limit is {100 * comparison.max_slowdown:+.1f}% per {comparison.per}" if comparison.max_slowdown else ""
    )
    steps = f"{format_duration(old_s)} per {comparison.of} {comparison.per} before, {format_duration(new_s)} now"
    if comparison.followed and comparison.verdict != "not_comparable":
        doubt = f", but {comparison.doubt}." if comparison.doubt else ":"
        changed = ", ".join(map(str, comparison.followed))
        speedup, least, most = map(_speedup, (slowdown, high, low))
        interval = f"(95% interval {least} to {most})"
        return f"{verdict}{doubt} {speedup} after {changed} {interval}{noise}{limit}: {steps}."
    interval = f"95% interval {100 * low:+.1f} to {100 * high:+.1f}%"
    return f"{verdict}: {steps}: {100 * slowdown:+.1f}% ({interval}){noise}{limit}."


def _speedup(slowdown: float) -> str:
    times = 1 / (1 + slowdown) if slowdown > -1 else math.inf
    return f"{times:.2f}x" if times < 2 else f"{times:.1f}x"


def earlier_report(folder: str | os.PathLike[str]) -> Report | None:
    """Return the last finished report in the folder, or else the newest one of the logger's other versions."""
    here, run, others = os.fspath(folder), run_folder(folder), []
    if os.path.basename(run).startswith("version_"):  # as Lightning's loggers name the folder of each run
        stage = here.removeprefix(run).strip("/")
        others = matching(os.path.dirname(run), os.path.join("version_*", stage, FILE_NAME))
        others.sort(key=last_modified, reverse=True)
    for file in (os.path.join(here, FILE_NAME), os.path.join(here, PREVIOUS_NAME), *others):
        with contextlib.suppress(ReportError):  # missing, from a newer version, or not ours
            report = load_report(file)
            if report.is_finished:
                return report
    return None


def confirm(new: Report, old: Report) -> str | None:
    """Return the result of following the older run's advice; ``None`` if it was not followed or cannot be measured."""
    comparison = compare(new, old)
    if comparison.verdict == "not_comparable" or not comparison.followed:
        return None
    return headline(comparison)
