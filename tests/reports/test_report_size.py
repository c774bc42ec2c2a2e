"""The size of a report, however large the job, and files of the former, larger format."""

import json
from dataclasses import replace

import pytest
from sample_report import REPORT
from simulated_report import DAY_S, simulated_report

from lightning_gpu_tools.reports.charts import mean
from lightning_gpu_tools.reports.schema import from_json, to_json
from lightning_gpu_tools.training.stopwatch import PhaseSpan
from lightning_gpu_tools.training.timeline import Series


@pytest.mark.parametrize(("nodes", "limit_bytes"), [(1, 1e6), (128, 5e6)])
def test_a_report_of_a_large_job_is_small(nodes: int, limit_bytes: float) -> None:
    report = simulated_report(nodes=nodes, gpus=8, seconds=30 * DAY_S, epochs=500)
    text = to_json(report)
    assert 0.3 * limit_bytes < len(text) < limit_bytes
    assert from_json(text) == report


def test_a_file_of_schema_version_one_is_read() -> None:
    """Its timelines are lists of points, its spans have no steps, and it lacks what came later."""
    series = {
        "power_watts": Series(2.0, 64.0, [300.0, 9.0]),
        "with a gap": Series(0.0, 1.5, [30.0, None, None, 0.0, 1.0]),
    }
    gpu, spans = replace(REPORT.gpus[0], timelines=series), (PhaseSpan(0.0, 1.5, {"training_step": 1.5}),)
    report = replace(REPORT, gpus=(gpu,), spans=spans, memory=(), step_s_p95=None, step_s_max=None)
    data = json.loads(to_json(report))
    for later in ("summary", "memory", "step_s_p95", "step_s_max", "lines", "gpu_step_s", "stalls", "process"):
        del data[later]
    data |= {"schema_version": 1, "memory_growth": None}
    data["spans"] = [span[:3] for span in data["spans"]]
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
