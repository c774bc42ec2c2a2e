"""The comparison of two runs: whether one is slower beyond the noise, and the effect of following advice."""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal

from lightning_gpu_tools.advice.cause import LOADER_SETTINGS
from lightning_gpu_tools.advice.causes import CAUSES
from lightning_gpu_tools.advice.findings import Finding, mean_interval, median_interval
from lightning_gpu_tools.advice.memory_causes import MEMORY_CAUSES
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.files import last_modified, matching
from lightning_gpu_tools.reports.report import FILE_NAME, PREVIOUS_NAME, Report
from lightning_gpu_tools.reports.report_file import load_report, run_folder
from lightning_gpu_tools.reports.scaling import (
    SCALED,
    Scaling,
    efficiency_line,
    kind_of_scaling,
    loss_lines,
    ranks_of,
    scaling,
)
from lightning_gpu_tools.reports.text import cause_phase, escape_markdown, phase_label
from lightning_gpu_tools.training.phases import PAUSES, PHASES, RANK_WAIT, TRAINING_STEP, base_phase
from lightning_gpu_tools.units import format_duration, printable, wrapped

# Settings that must match so that a difference in speed is due to the program.
_MUST_MATCH = (
    *("stage", "cpu", "gpu", "accelerator", "world_size", "precision", "batch_size", "accumulate_grad_batches"),
    *LOADER_SETTINGS,
)
_SAME_PROGRAM = ("model", "dataset", "stage")
_SETTINGS = {name: cause.settings for name, cause in {**CAUSES, **MEMORY_CAUSES}.items()}
# The phases that a setting cannot speed up, with one rank. Several ranks wait for each other in their steps.
_UNTOUCHED: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(LOADER_SETTINGS, frozenset({TRAINING_STEP, "callback", "logging", "trainer"})),
    "precision": frozenset({"data_loading", "callback", "logging", "trainer"}),
}

# With five blocks or fewer, not even their full range is a 95 % interval of the median.
_MIN_BLOCKS = 6
_CHANGED = 0.5  # our default: a phase counts as changed if it takes less than half as long
_MAX_ELSEWHERE = 0.5  # our default: if a larger part of the gain is in other phases, the change does not explain it
# Of 15 runs on two cores, the one that most exceeded its prediction was 1.17 times as fast as predicted.
_MAX_BEYOND = 1.25
_PARTS = 16  # our default: parts of a run, for the mean or median time of a phase

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
    per: str = "step"  # or "sample", after an advised change of the batch size, or of the number of ranks
    old_step_s: float | None = None
    new_step_s: float | None = None
    slowdown: float | None = None  # 0.07 = a step takes 7 % longer
    slowdown_low: float | None = None  # of its 95 % interval
    slowdown_high: float | None = None
    max_slowdown: float  # the limit
    changes: tuple[Change, ...]  # of all settings
    followed: tuple[Change, ...] = ()  # of the settings in the older run's advice, which the runs test
    doubt: str | None = None  # the reason why the gain is not due to them
    scaling: Scaling | None = None  # if the runs differ in the number of ranks: the times are then of the whole job


def compare(new: Report, old: Report, max_slowdown: float = 0.0) -> Comparison:
    """Compare two runs by the time of their steady steps: ``slower`` means beyond the noise and the limit (0.05 = 5 %).

    Settings in the older run's advice may differ: the comparison then shows the effect of following it. The number of
    ranks may also differ if each rank or the job has the same batch: it then shows how the program scales.
    """
    kind = kind_of_scaling(new, old) if _is_same_program(new, old) else None
    may_differ = SCALED if kind else ()
    names = sorted({*new.settings, *old.settings})
    changes = tuple(
        Change(setting=name, old=old.settings.get(name), new=new.settings.get(name))
        for name in names
        if old.settings.get(name) != new.settings.get(name)
    )
    findings = old.diagnosis.findings if _is_same_program(new, old) else ()
    advised = {setting for finding in findings for setting in _advised(finding)}
    followed = tuple(change for change in changes if change.setting in advised and change.setting not in may_differ)
    reasons = [
        f"{change.setting} differs: {_show(change.old)} before, {_show(change.new)} now"
        for change in changes
        if change.setting in _MUST_MATCH and change not in followed and change.setting not in may_differ
    ]
    for name, report in (("old", old), ("new", new)):
        if len(report.step_s_blocks) < _MIN_BLOCKS:
            reasons.append(
                f"the {name} run is too short: it has {len(report.step_s_blocks)} blocks of steady steps, but an "
                f"estimate of its noise needs {_MIN_BLOCKS}"
            )
    per_sample = bool(kind) or any(change.setting == "batch_size" for change in followed)
    old_blocks, new_blocks = (_blocks(report, per_sample, ranks_of(report) if kind else 1) for report in (old, new))
    speed = _change_of_speed(old_blocks, new_blocks)
    verdict: Verdict = "same"
    if reasons:
        verdict = "not_comparable"
    elif speed["slowdown"] > max_slowdown and speed["slowdown_low"] > 0:
        verdict = "slower"
    elif speed["slowdown_high"] < 0:
        verdict = "faster"
    comparison = Comparison(
        verdict=verdict,
        reasons=tuple(reasons),
        per="sample" if per_sample else "step",
        max_slowdown=max_slowdown,
        changes=changes,
        followed=followed,
        **speed,
    )
    if kind and not reasons:
        phase_s = [steady_phase_s(report) for report in (new, old)]
        return replace(comparison, scaling=scaling(kind, new, old, speed, phase_s))
    if followed:
        untouched = frozenset.intersection(*(_UNTOUCHED.get(one.setting, frozenset()) for one in followed))
        settings = {change.setting for change in followed}
        tested = [one for one in findings if settings & {*_advised(one)}]
        comparison = replace(comparison, doubt=_doubt(comparison, new, old, untouched, tested))
    return comparison


def _is_same_program(new: Report, old: Report) -> bool:
    return all(new.settings.get(name) == old.settings.get(name) for name in _SAME_PROGRAM)


def _advised(finding: Finding) -> Sequence[str]:
    """Return the settings of a finding's cause if its advice names any of them: some of it is about other things."""
    settings = _SETTINGS.get(finding.cause, ())
    return settings if any(name in finding.advice for name in settings) else ()


def _blocks(report: Report, per_sample: bool, ranks: int) -> tuple[float, ...]:
    size = report.settings.get("batch_size") if per_sample else 1
    samples = ranks * (size if isinstance(size, int) and size > 0 else 1)
    return tuple(step_s / samples for step_s in report.step_s_blocks)


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


def _doubt(
    comparison: Comparison, new: Report, old: Report, untouched: frozenset[str], findings: Sequence[Finding]
) -> str | None:
    """Return why a gain is not due to the change, if it is in other phases, or far beyond the prediction."""
    if comparison.verdict != "faster":
        return None
    if new.settings.get("world_size", 1) != 1:
        untouched = frozenset()
    before, now = (steady_phase_s(report, comparison.of) for report in (old, new))
    gains = {phase: before.get(phase, 0.0) - now.get(phase, 0.0) for phase in {*before, *now} - {*PAUSES}}
    whole, elsewhere = sum(gains.values()), sum(gain for phase, gain in gains.items() if phase in untouched)
    if whole > 0 and elsewhere > _MAX_ELSEWHERE * whole:
        phase = max(untouched, key=lambda one: gains.get(one, 0.0))
        share = min(elsewhere / whole, 1.0)
        times = f"{format_duration(before.get(phase, 0.0))} -> {format_duration(now.get(phase, 0.0))} per step"
        return (
            f"the machine was not the same: {100 * share:.0f} % of the gain is in phases that this change cannot speed "
            f'up, mostly in "{phase_label(phase)}" ({times})'
        )
    predicted = math.prod(finding.ceiling for finding in findings)
    slowest = _speedups(comparison)[1]
    if slowest > _MAX_BEYOND * predicted:
        return f"the machine was not the same: the advice predicted at most {_times(predicted)}"
    return None


def steady_phase_s(report: Report, of: str = "mean") -> dict[str, float]:
    """Return the mean or median time per step of each group of phases, without the warm-up, largest first."""
    typical: Callable[[Sequence[float]], float] = median if of == "median" else fmean
    parts = list(_parts(report))
    names = dict.fromkeys(name for part in parts for name in part)
    times = {name: typical([part.get(name, 0.0) for part in parts]) for name in names}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def _parts(report: Report) -> Iterator[Mapping[str, float]]:
    """Yield the time per step by group of phases in parts of the run with about equal numbers of steps."""
    done, steps, spent = 0, 0, defaultdict[str, float](float)
    steady = sum(span.steps for span in report.spans) - report.warm_up_steps
    for span in report.spans if steady > 0 else ():
        done += span.steps
        if done <= report.warm_up_steps:
            continue
        steps += span.steps
        for phase, seconds in span.phase_s.items():
            spent[phase] += seconds
        if steps and steps >= steady / _PARTS:
            yield {phase: seconds / steps for phase, seconds in spent.items()}
            steps, spent = 0, defaultdict(float)
    if steady <= 0:  # too short, or a file of schema version 1
        for phase, seconds in report.phase_s.items():
            spent[base_phase(phase)] += seconds
        yield {phase: seconds / max(1, report.steps) for phase, seconds in spent.items()}


def _speedups(comparison: Comparison) -> tuple[float, float, float]:
    """Return how many times as fast the newer run is, and the ends of the 95 % interval."""
    slowdowns = (comparison.slowdown, comparison.slowdown_high, comparison.slowdown_low)
    ratios = [1 + (one or 0.0) for one in slowdowns]
    speedup, low, high = (1 / ratio if ratio > 0 else math.inf for ratio in ratios)
    return speedup, low, high


def _times(speedup: float) -> str:
    """Return a measured speedup as text: ``"1.31x"``, or ``"3.5x"`` from 2 on."""
    return f"{speedup:.2f}x" if speedup < 2 else f"{speedup:.1f}x"


def _show(value: Any) -> str:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return printable(", ".join(map(printable, values)), 300) or "None"


def render_comparison(comparison: Comparison, confirmation: str | None = None) -> str:
    """Return the comparison as text, as wide as the terminal; ``confirmation`` is the result of :func:`confirm`."""
    lines = [headline(comparison), *details(comparison, confirmation)]
    return "\n".join(map(wrapped, lines))


def comparison_markdown(comparison: Comparison, confirmation: str | None = None) -> str:
    """Return the comparison as Markdown for a pull request."""
    verdict, separator, numbers = headline(comparison).partition(": ")
    lines = [f"**{escape_markdown(verdict)}{separator.strip()}** {escape_markdown(numbers)}", ""]
    return "\n".join([*lines, *(f"- {escape_markdown(line)}" for line in details(comparison, confirmation))]).rstrip()


def headline(comparison: Comparison) -> str:
    """Return the result in one line: of the tested change, or of the two runs."""
    verdict = "NO SLOWER" if comparison.verdict == "same" else comparison.verdict.replace("_", " ").upper()
    old_s, new_s = comparison.old_step_s, comparison.new_step_s
    slowdown, low, high = comparison.slowdown, comparison.slowdown_low, comparison.slowdown_high
    if old_s is None or new_s is None or slowdown is None or low is None or high is None:
        return f"{verdict}: there are no steady steps to compare."
    noise = ", within the noise of the runs" if low <= 0 <= high else ""
    limit = (
        f"; the limit is {100 * comparison.max_slowdown:+.1f} % per {comparison.per}" if comparison.max_slowdown else ""
    )
    steps = f"{format_duration(old_s)} per {comparison.of} {comparison.per} before, {format_duration(new_s)} now"
    if comparison.scaling is not None:
        return efficiency_line(comparison.scaling)
    if comparison.followed and comparison.verdict != "not_comparable":
        doubt = f", but {comparison.doubt}." if comparison.doubt else ":"
        return f"{verdict}{doubt} {_speedup(comparison, f' after {_changed(comparison)}')}{noise}{limit}: {steps}."
    interval = f"95 % interval {100 * low:+.1f} to {100 * high:+.1f} %"
    return f"{verdict}: {steps}: {100 * slowdown:+.1f} % ({interval}){noise}{limit}."


def _changed(comparison: Comparison) -> str:
    return ", ".join(map(str, comparison.followed))


def _speedup(comparison: Comparison, after: str = "") -> str:
    speedup, low, high = map(_times, _speedups(comparison))
    return f"{speedup}{after} (95 % interval {low} to {high})"


def details(comparison: Comparison, confirmation: str | None = None) -> list[str]:
    """Return the lines below the headline."""
    is_test = comparison.verdict != "not_comparable"
    named = {change.setting for change in comparison.followed} if is_test else {*_MUST_MATCH}
    advised = () if is_test else comparison.followed
    return [
        *([] if comparison.scaling is None else loss_lines(comparison.scaling)),
        *(f"Not comparable: {reason}." for reason in comparison.reasons),
        *(f"Changed as advised: {change}." for change in advised),
        *(f"Changed: {change}." for change in comparison.changes if change.setting not in named),
        *([] if confirmation is None or comparison.followed else [f"Result of the change: {confirmation}"]),
    ]


def is_of_one_run(folder: str | os.PathLike[str]) -> bool:
    """Return whether the next run gets another folder, from the name that Lightning's loggers give it."""
    return os.path.basename(run_folder(folder)).startswith("version_")


def earlier_report(folder: str | os.PathLike[str]) -> Report | None:
    """Return the last finished report in the folder, or else the newest one of the logger's other versions."""
    here, run, others = os.fspath(folder), run_folder(folder), []
    if is_of_one_run(here):
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
    if not old.diagnosis.findings or not _is_same_program(new, old):
        return None
    comparison = compare(new, old)
    if comparison.verdict == "not_comparable":
        return None
    if comparison.followed:
        return _result(_changed(comparison), comparison)
    phase = cause_phase(old)
    if phase is None or not _phase_per_step(phase, new) < _CHANGED * _phase_per_step(phase, old):
        return None
    if phase in PAUSES:  # not part of a steady step, so only the whole run shows it
        if not new.wall_s:
            return None
        speedup = (old.wall_s / max(1, old.steps)) / (new.wall_s / max(1, new.steps))
        return f"{_phase_change(phase, new, old)}: {_times(speedup)}, measured over the whole run."
    others = frozenset(PHASES) - {base_phase(phase)}
    doubt = _doubt(comparison, new, old, others, old.diagnosis.findings[:1])
    return _result(_phase_change(phase, new, old), replace(comparison, doubt=doubt))


def _result(what: str, comparison: Comparison) -> str:
    _, low, high = _speedups(comparison)
    verdict = ", not confirmed: it is within the noise of the runs."
    if low > 1:
        verdict = ", confirmed." if comparison.doubt is None else f", but {comparison.doubt}."
    elif high < 1:
        verdict = ", slower. Undo the change."
    return f"{what}: {_speedup(comparison)}{verdict}"


def _phase_per_step(phase: str, report: Report) -> float:
    # Waiting for other ranks is recorded only in parts, by the phase that waited.
    parts = [name for name in report.phase_s if name == phase or base_phase(name) == phase == RANK_WAIT]
    return sum(report.phase_s[name] for name in parts) / max(1, report.steps)


def _phase_change(phase: str, new: Report, old: Report) -> str:
    group, _, name = phase.partition("/")
    before, now = (format_duration(_phase_per_step(phase, report)) for report in (old, new))
    return f"{printable(name) or phase_label(group)} {before} -> {now} per step"
