"""How large a report is, however large the job, and that the smaller format reads what the former one holds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sample_report import REPORT
from simulated_report import DAY_S, simulated_report

from lightning_gpu_tools.cli import main
from lightning_gpu_tools.reports.charts import mean
from lightning_gpu_tools.reports.report_file import load_report
from lightning_gpu_tools.reports.schema import from_json, to_json
from lightning_gpu_tools.training.timeline import Series


@pytest.mark.parametrize(("nodes", "limit_bytes"), [(1, 1e6), (128, 5e6)])
def test_a_report_of_a_large_job_is_small(nodes: int, limit_bytes: float) -> None:
    report = simulated_report(nodes=nodes, gpus=8, seconds=30 * DAY_S, epochs=500)
    text = to_json(report)
    assert 0.3 * limit_bytes < len(text) < limit_bytes
    assert from_json(text) == report


def test_a_file_of_schema_version_one_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """It was written by a training of November 2026, on a fake GPU; its spans have no steps."""
    file = Path(__file__).parent / "schema_1.json"
    report = load_report(file)
    assert (report.steps, report.diagnosis.verdict, len(report.gpus)) == (90, "low", 1)
    assert [len(span) for span in json.loads(file.read_text())["spans"]] == [3] * len(report.spans)
    assert report.spans[-1].end_s == pytest.approx(report.wall_s)
    assert report.gpus[0].timelines["power_watts"].values == [100.0] * 7
    assert main(["report", str(file)]) == 0
    assert "Waiting for data takes 86 %" in capsys.readouterr().out
    assert main(["report", str(file), "--against", str(file)]) == 0


def test_the_points_of_schema_version_one_become_intervals() -> None:
    series = {
        "power_watts": Series(2.0, 64.0, [300.0, 9.0]),
        "with a gap": Series(0.0, 1.5, [30.0, None, None, 0.0, 1.0]),
    }
    report = replace(REPORT, gpus=(replace(REPORT.gpus[0], timelines=series),))
    data = json.loads(to_json(report))
    data["schema_version"] = 1
    data["gpus"][0]["timelines"] = {name: one.points() for name, one in series.items()}
    assert from_json(json.dumps(data)) == report


def test_other_nodes_send_short_timelines_at_the_end_alone() -> None:
    (gpu,) = simulated_report(gpus=1).gpus
    assert gpu.to_send(at_end=False).timelines == {}
    sent = gpu.to_send(at_end=True).timelines
    lengths = {name: len(one.values) for name, one in sent.items()}
    assert lengths.keys() == {"utilization_percent", "memory_used_bytes"}
    assert 64 <= lengths["utilization_percent"] <= 128
    assert 16 <= lengths["memory_used_bytes"] <= 32
    for name, one in sent.items():
        assert mean(one.values) == pytest.approx(mean(gpu.timelines[name].values), rel=0.01)
