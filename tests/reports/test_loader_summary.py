"""The search for DataLoader settings in the report: as data and as text."""

from dataclasses import replace

import pytest
from sample_report import REPORT

from lightning_gpu_tools.advice.loader_trials import LoaderResult, LoaderTrial
from lightning_gpu_tools.reports.loader_summary import summarize
from lightning_gpu_tools.reports.report import from_json, to_json
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.training.run_measurements import LoaderSettings

YOURS = LoaderSettings(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
TRIED = replace(YOURS, num_workers=4, prefetch_factor=2)
TRIALS = (
    LoaderTrial(settings=YOURS, batch_s=0.05, wait_s=0.04, measured=False),
    LoaderTrial(settings=TRIED, batch_s=0.012, batches=20, seconds=0.5, wait_s=0.001),
    LoaderTrial(settings=TRIED, batch_s=0.013, batches=20, seconds=0.5, wait_s=0.001),
)
FOUND = LoaderResult(
    original=YOURS,
    settings=replace(TRIED, persistent_workers=True),
    reason="80 batches/s against 20 with the settings before.",
    applied=True,
    confirmed=True,
    trials=TRIALS,
    seconds=3.0,
    wait_share=0.08,
)


def test_it_comes_back_from_the_file_as_it_was() -> None:
    report = replace(REPORT, loader=summarize(FOUND))
    assert report.loader is not None
    assert (report.loader.users_batches_per_s, report.loader.batches_per_s) == pytest.approx((20.0, 80.0))
    assert from_json(to_json(report)) == report
    assert from_json(to_json(REPORT)).loader is None


def test_it_is_a_line_of_the_text() -> None:
    text = render_text(replace(REPORT, loader=summarize(FOUND)))
    line = "NumWorkersFinder found num_workers=4 in 3 s (in use). 80 batches/s against 20 with the settings\n  before."
    assert line in text
    assert "NumWorkersFinder" not in render_text(REPORT)


def test_what_was_left_alone_says_why() -> None:
    alone = LoaderResult(original=None, settings=None, reason="The training loader is left as it is: it is a Stream.")
    text = render_text(replace(REPORT, loader=summarize(alone)))
    assert "NumWorkersFinder: The training loader is left as it is: it is a Stream." in text
