"""The measured result of following an earlier run's advice."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.reports.comparison import compare
from lightning_gpu_tools.reports.report import FILE_NAME, PREVIOUS_NAME, Report, load_report
from lightning_gpu_tools.reports.text import cause_phase, phase_label
from lightning_gpu_tools.training.phases import PAUSES, RANK_WAIT, base_phase
from lightning_gpu_tools.units import format_duration, printable

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
