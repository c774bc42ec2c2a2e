"""Picture and page of a report: they are drawn at the end of a run, and nothing else is lost if that fails."""

from pathlib import Path

import pytest
from sample_report import REPORT
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.reports.report import Report, ReportFile
from lightning_gpu_tools.runs import publish as publishing

pytest.importorskip("matplotlib", reason="needs the extra plot")

PAGE, DATA, PICTURE = FILES = ["gpu_report.html", "gpu_report.json", "gpu_report.png"]


@pytest.fixture(autouse=True)
def no_pictures() -> None:
    """Have reports drawn, unlike in the other tests."""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_fit_is_drawn_after_its_report_unless_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fit(steps: int) -> str:
        advisor = GPUUtilizationAdvisor(min_steps=20, min_seconds=0)
        trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor(), advisor])
        trainer.fit(Model(), loader(Samples(steps)))
        return capsys.readouterr().out

    folder = tmp_path / "gpu_report"
    drawn = f"Report: {folder / DATA}\nPicture and page: {folder / PICTURE} and {folder / PAGE}\n"
    assert fit(90).endswith(drawn)
    assert names(folder) == FILES
    assert (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert (folder / PAGE).read_text().startswith("<!DOCTYPE html>")
    assert fit(3).endswith(f"Report: {folder / DATA}\nThe run is too short for a picture.\n")
    assert load_report(tmp_path).diagnosis.verdict == "too_short"
    assert names(folder) == [DATA, "gpu_report.previous.json"]  # no picture of the earlier run


def test_why_there_is_no_picture_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(report: Report) -> bytes:
        raise OSError("no fonts\x1b")

    monkeypatch.setattr(publishing, "png_of", fail)
    publishing.publish(REPORT, ReportFile(tmp_path / "run"))
    assert capsys.readouterr().out.endswith("The report could not be drawn: OSError: no fonts\\x1b\n")
    assert names(tmp_path / "run") == [DATA]
