"""The search for DataLoader settings in the report: as data and as text."""

from dataclasses import replace

from sample_report import REPORT

from lightning_gpu_tools.advice.loader_trials import LoaderResult, LoaderTrial
from lightning_gpu_tools.reports.report import from_json, summarize, to_json
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.training.run_measurements import LoaderSettings

ORIGINAL = LoaderSettings(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False)
TRIED = replace(ORIGINAL, num_workers=4, prefetch_factor=2)
FOUND = LoaderResult(
    original=ORIGINAL,
    settings=replace(TRIED, persistent_workers=True),
    reason="80 batches/s against 20 with the original settings.",
    applied=True,
    confirmed=True,
    trials=(LoaderTrial(settings=ORIGINAL, batch_s=0.05), LoaderTrial(settings=TRIED, batch_s=0.0125)),
    seconds=3.0,
    wait_share=0.08,
)


def test_it_survives_the_file() -> None:
    report = replace(REPORT, loader=summarize(FOUND))
    assert report.loader is not None
    assert (report.loader.users_batches_per_s, report.loader.batches_per_s) == (20.0, 80.0)
    assert from_json(to_json(report)) == report
    assert from_json(to_json(REPORT)).loader is None


def test_it_is_one_line_of_the_text() -> None:
    text = render_text(replace(REPORT, loader=summarize(FOUND)))
    line = (
        "NumWorkersFinder found num_workers=4 in 3 s (in use). 80 batches/s against 20 with the original\n  settings."
    )
    assert line in text
    assert "NumWorkersFinder" not in render_text(REPORT)


def test_an_unchanged_loader_comes_with_the_reason() -> None:
    alone = LoaderResult(original=None, settings=None, reason="The training loader is left as it is: it is a Stream.")
    text = render_text(replace(REPORT, loader=summarize(alone)))
    assert "NumWorkersFinder: The training loader is left as it is: it is a Stream." in text
