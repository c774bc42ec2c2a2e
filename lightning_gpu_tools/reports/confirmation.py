"""What following an earlier run's advice has brought, measured. Pure, but for the search for that run's report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.reports.comparison import Change, compare, median_interval, show_setting
from lightning_gpu_tools.reports.report import FILE_NAME, Report, load_report
from lightning_gpu_tools.reports.text import phase_label
from lightning_gpu_tools.units import format_duration, printable

# What advice changes, by its name in Report.settings; all else must be alike.
_ADVISED = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "precision", "batch_size")
# Runs that differ here are of other programs: nothing was followed.
_SAME_PROGRAM = ("model", "dataset")
# These are not part of a steady step, so that the whole run is what they slow down.
_OUTSIDE_STEADY_STEPS = ("validation", "checkpoint", "epoch_start")
# A choice: the thing that took time is taken for changed if it takes less than half as long.
_CHANGED = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmation:
    """What a change has brought.

    Attributes:
        what: What was changed, in words.
        speedup: How much faster training is: 0.31 = +31 %.
        low: Lower end of its interval, which holds it with at least 95 % confidence; ``None`` without one.
        high: Upper end.
    """

    what: str
    speedup: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        says = f"{self.what}: {100 * self.speedup:+.0f} %"
        if self.low is None or self.high is None:
            return f"{says}, measured."
        interval = f"95 % interval {100 * self.low:+.0f} to {100 * self.high:+.0f} %"
        if self.low > 0:
            return f"{says} ({interval}), confirmed."
        if self.high < 0:
            return f"{says} ({interval}): slower, so take it back."
        return f"{says} ({interval}): within the noise of the runs, not confirmed."


def earlier_report(folder: str | Path) -> Report | None:
    """Return the report of the run before: at the same place, or in the newest of the loggers' other versions."""
    here = Path(folder)
    files = [here / FILE_NAME]
    if here.name.startswith("version_"):
        others = [file for file in here.parent.glob(f"version_*/{FILE_NAME}") if file.parent != here]
        files += sorted(others, key=_modified_s, reverse=True)
    for file in files:
        if file.exists():
            try:
                return load_report(file)
            except ReportError:  # of a newer version, or not ours: nothing to compare with
                return None
    return None


def _modified_s(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # a link to nothing, or just removed
        return 0.0


def confirm(new: Report, old: Report) -> Confirmation | None:
    """Return what the advice of an older run has brought; ``None`` if it was not followed, or cannot be told.

    Args:
        new: The run in question.
        old: A run with advice.
    """
    if not old.diagnosis.findings or any(new.settings.get(name) != old.settings.get(name) for name in _SAME_PROGRAM):
        return None
    advised = [change for change in compare(new, old).changes if change.setting in _ADVISED]
    aligned = {**old.settings, **{change.setting: change.new for change in advised}}
    comparison = compare(new, replace(old, settings=aligned))
    if comparison.verdict == "not_comparable":
        return None
    phase = _phase(old)
    if phase in _OUTSIDE_STEADY_STEPS:
        if not _took_less(phase, new, old) or not new.wall_s:
            return None
        return Confirmation(what=_phase_change(phase, new, old), speedup=_per_step(old) / _per_step(new) - 1)
    if advised:
        what = ", ".join(_setting_change(change) for change in advised)
    elif phase is not None and _took_less(phase, new, old):
        what = _phase_change(phase, new, old)
    else:
        return None
    return _faster(what, _scaled(old), _scaled(new))


def _faster(what: str, old_s: Sequence[float], new_s: Sequence[float]) -> Confirmation | None:
    old, new = median_interval(old_s), median_interval(new_s)
    if old is None or new is None:
        return None
    return Confirmation(
        what=what, speedup=median(old_s) / median(new_s) - 1, low=old[0] / new[1] - 1, high=old[1] / new[0] - 1
    )


def _scaled(report: Report) -> list[float]:
    """Return the times of steady steps, for each sample where it is known how many a step has."""
    size = report.settings.get("batch_size")
    samples = size if isinstance(size, int) and size > 0 else 1
    return [step_s / samples for step_s in report.step_s_blocks]


def _phase(report: Report) -> str | None:
    """Return the phase of the time tree that the first finding is about."""
    first = report.diagnosis.findings[0]
    name = first.evidence.get("name")
    phase = f"{first.cause}/{name}" if name else first.cause
    return phase if phase in report.phase_s else None


def _per_step(report: Report) -> float:
    return report.wall_s / max(1, report.steps)


def _phase_per_step(phase: str, report: Report) -> float:
    return report.phase_s.get(phase, 0.0) / max(1, report.steps)


def _took_less(phase: str | None, new: Report, old: Report) -> bool:
    return phase is not None and _phase_per_step(phase, new) < _CHANGED * _phase_per_step(phase, old)


def _phase_change(phase: str | None, new: Report, old: Report) -> str:
    assert phase is not None
    group, _, name = phase.partition("/")
    before, now = (format_duration(_phase_per_step(phase, report)) for report in (old, new))
    return f"{printable(name) or phase_label(group)} {before} -> {now} a step"


def _setting_change(change: Change) -> str:
    return f"{change.setting} {show_setting(change.old)} -> {show_setting(change.new)}"
