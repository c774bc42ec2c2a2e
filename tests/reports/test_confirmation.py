"""The result of following the advice of the previous run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from sample_report import REPORT, with_finding

from lightning_gpu_tools.reports.comparison import compare, confirm, earlier_report, headline
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.reports.report_file import ReportFile
from lightning_gpu_tools.training.stopwatch import PhaseSpan

SETTINGS: dict[str, Any] = {
    "num_workers": 0,
    "pin_memory": False,
    "batch_size": 8,
    "accelerator": "CPU",
    "world_size": 1,
}


def report(step_ms: float, noise: float = 0.01, **changes: Any) -> Report:
    """Return a run with steps of this length, half of them waiting for data."""
    blocks = tuple(step_ms / 1e3 * (1 + noise * (i % 5 - 2) / 2) for i in range(40))
    fields = {"step_s_blocks": blocks, "steps": 400, "wall_s": 0.4 * step_ms, "settings": SETTINGS, **changes}
    return dataclasses.replace(REPORT, **{"phase_s": {"data_loading": 0.2 * step_ms}, **fields})


def with_settings(run: Report, **settings: Any) -> Report:
    return dataclasses.replace(run, settings={**run.settings, **settings})


def test_a_speedup_is_confirmed_with_its_interval() -> None:
    found = confirm(with_settings(report(10), num_workers=4), report(13.1))
    assert found == "num_workers 0 -> 4: 1.31x (95% interval 1.30x to 1.32x), confirmed."


def test_noise_is_not_confirmed_and_a_slowdown_is_undone() -> None:
    same = confirm(with_settings(report(10, 0.2), num_workers=4), report(10.1, 0.2))
    assert "not confirmed: it is within the noise" in str(same)
    slower = confirm(with_settings(report(15), num_workers=4), report(10))
    assert str(slower).startswith("num_workers 0 -> 4: 0.67x (95% interval 0.6")
    assert str(slower).endswith("), slower. Undo the change.")


@pytest.mark.parametrize(
    "new",
    [
        with_settings(report(5), num_workers=4, accelerator="CUDAAccelerator"),  # not comparable
        with_settings(report(5), num_workers=4, model="Another"),  # another program, not this one with a change
        with_settings(report(5), num_workers=4, batch_size=16),  # advised, and not advised
        report(5),  # nothing that was advised has changed
        with_settings(dataclasses.replace(report(5), step_s_blocks=()), num_workers=4),  # too short
    ],
)
def test_what_was_not_followed_or_measured_has_no_result(new: Report) -> None:
    assert confirm(new, report(10)) is None


def in_phases(*, data_ms: float, step_ms: float, spans: bool = False, **changes: Any) -> Report:
    """Return a run of 400 steps with so much of each phase a step; with spans, after a long first one."""
    phase_s = {"data_loading": 0.4 * data_ms, "training_step": 0.4 * step_ms}
    per_span = {name: seconds / 40 for name, seconds in phase_s.items()}
    length_s = sum(per_span.values())
    parts = [PhaseSpan(length_s * i, length_s * (i + 1), per_span, 10) for i in range(40)] if spans else []
    return report(data_ms + step_ms, phase_s=phase_s, spans=tuple(parts), **changes)


def test_a_gain_outside_the_change_is_not_credited_to_it() -> None:
    new = with_settings(in_phases(data_ms=29, step_ms=9.9), num_workers=1)
    old = in_phases(data_ms=43.2, step_ms=75)
    doubt = (
        "but the machine was not the same: 82% of the gain is in phases that this change cannot speed up, mostly in "
        '"training step" (75 ms -> 9.9 ms per step).'
    )
    assert confirm(new, old) == f"num_workers 0 -> 1: 3.0x (95% interval 3.0x to 3.1x), {doubt}"
    first = headline(compare(new, old))
    assert first.startswith(f"FASTER, {doubt} 3.0x after num_workers 0 -> 1 (95% interval 3.0x to 3.1x): 118 ms per")


@pytest.mark.parametrize(
    ("old_ms", "ranks", "cause", "change"),
    [
        ((5, 40), 2, "data_loading", {"num_workers": 4}),  # ranks wait for others in their steps
        ((5, 40), 1, "low_precision", {"precision": "bf16-mixed"}),
        ((25, 20), 1, "data_loading", {"num_workers": 4}),  # most of it is in the loading
    ],
)
def test_a_gain_that_the_change_can_bring_is_confirmed(
    old_ms: tuple[float, float], ranks: int, cause: Any, change: dict[str, Any]
) -> None:
    old = with_settings(in_phases(data_ms=old_ms[0], step_ms=old_ms[1]), world_size=ranks)
    old = with_finding(old, cause=cause, advice=f"Set {change}.", ceiling=9.0)
    new = with_settings(in_phases(data_ms=5, step_ms=10), world_size=ranks, **change)
    assert str(confirm(new, old)).endswith(", confirmed.")


def test_the_previous_run_is_in_the_folder_or_newest_version(tmp_path: Path) -> None:
    assert earlier_report(tmp_path) is None
    ReportFile(tmp_path).save(report(10))
    assert earlier_report(tmp_path) is not None
    for version, step_ms in enumerate((20, 30)):
        file = ReportFile(tmp_path / f"version_{version}").save(report(step_ms))
        os.utime(file, (version, version))
    found = earlier_report(tmp_path / "version_2")
    assert found is not None
    assert found.wall_s == 0.4 * 30
    (tmp_path / "version_7").mkdir()
    (tmp_path / "version_7" / "gpu_report.json").symlink_to("nothing")
    assert earlier_report(tmp_path / "version_2") == found
    (tmp_path / "gpu_report.json").write_text("something else")
    assert earlier_report(tmp_path) is None
