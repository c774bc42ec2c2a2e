"""A fact that cannot be read is left out of the report, which says so; all others are there."""

import ast
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils.data import DataLoader
from trainings import Model, Samples, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.runs import run_loaders, run_recorder, surroundings
from lightning_gpu_tools.training import compat, cores, step_clock
from lightning_gpu_tools.training.cores import WorkerWatch
from lightning_gpu_tools.training.line_sampler import LineSampler
from lightning_gpu_tools.training.run_measurements import RunMeasurements, StepBlock
from lightning_gpu_tools.types import Report

STEPS = 100
# Where a fact comes from: what the report calls it.
SOURCES = {
    (cores, "read_host_budget"): "the host's cores and memory",
    (cores, "children_cpu_s"): "the workers' CPU time",
    (cores, "idle_cpu_s"): "the idle time of the cores",
    (cores, "thread_times"): "the runnable threads",
    (run_loaders, "settings_of"): "the loader's settings",
    (run_loaders, "read_loader_facts"): "the loader's dataset",
    (run_recorder, "batch_bytes"): "the batch's size",
    (surroundings, "gpu_readings"): "the disk and the claims of this machine",
    (compat, "matmul_precision"): "the precision of matrix products",
    (WorkerWatch, "after_step"): "the loader's workers",
    (LineSampler, "seen"): "source lines",
}


class Refused(Exception):
    def __str__(self) -> str:
        raise RuntimeError("a text that cannot be made, either")


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise Refused("as a new kernel may")


def trained(folder: Path) -> Report:
    trainer = quiet_trainer(folder, callbacks=[GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0.001)])
    trainer.fit(Model(), DataLoader(Samples(2 * STEPS), batch_size=2))
    return load_report(folder)


@pytest.mark.parametrize(
    ("module", "record", "makers"),
    [(run_recorder, RunMeasurements, ["RunMeasurements"]), (step_clock, StepBlock, ["StepBlock", "replace"])],
)
def test_every_measurement_is_made(module: ModuleType, record: type, makers: list[str]) -> None:
    # The examples of a cause fill its measurements by hand, so they would not show that a run never does.
    calls = (one for one in ast.walk(ast.parse(Path(str(module.__file__)).read_text())) if isinstance(one, ast.Call))
    making = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id in makers)
    made = {keyword.arg for call in making for keyword in call.keywords}
    assert {field.name for field in fields(record)} - made <= {"searched"}  # which the report adds


def test_each_fact_is_left_out_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in SOURCES:
        monkeypatch.setattr(owner, name, refuse)
    report = trained(tmp_path)
    assert (report.outcome, report.steps) == ("completed", STEPS)
    assert report.diagnosis.verdict in ("low", "healthy")
    assert sum(report.phase_s.values()) == pytest.approx(report.wall_s)
    assert report.diagnosis.step_p95_s is not None
    reason = f"({__name__}.Refused: <exception str() failed>)"
    assert {f"{what} {reason}" for what in SOURCES.values()} <= {*report.unseen}
