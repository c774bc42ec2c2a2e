"""Source lines that a real training names, however long they take."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import decoding
import pytest
import torch
from decoding import Decoded
from lightning.pytorch import Callback, Trainer
from trainings import Boom, Model, Samples, burn, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report, watch
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.runs.run_recorder import RunRecorder
from lightning_gpu_tools.training import line_sampler
from lightning_gpu_tools.training.line_sampler import WorkerLines
from lightning_gpu_tools.training.phases import CALLBACK, DATA_LOADING

ENOUGH = 40  # samples, so that a busy machine's few at other lines do not matter
MAX_STEPS = 5_000


class Slow(Callback):
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        burn(0.005)


class Until(Callback):
    """Trains until enough samples of a phase were taken, and validation was run."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        (monitor,) = (one for one in trainer.callbacks if isinstance(one, GPUUtilizationMonitor))  # type: ignore[attr-defined]
        assert monitor._session is not None
        has_validated = monitor._session.clock.validations or not trainer.val_dataloaders
        if has_validated and seen(monitor._session.recorder, self.phase) >= ENOUGH:
            trainer.should_stop = True


def seen(recorder: RunRecorder | None, phase: str) -> int:
    assert recorder is not None
    lines = recorder.lines.seen(recorder.loaders.workers.pids)
    return sum(one.samples for one in lines if one.phase.startswith(phase))


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sample often; afterwards Python's switch interval is as it was, and no file is left."""
    monkeypatch.setattr(line_sampler, "MEAN_S", 0.01)
    folders: list[str] = []
    sampled, before_s = WorkerLines.sampled, sys.getswitchinterval()

    def remembered(self: WorkerLines, loop: Any) -> Any:
        try:
            return sampled(self, loop)
        finally:
            folders.append(str(self._folder))

    monkeypatch.setattr(WorkerLines, "sampled", remembered)
    yield
    assert sys.getswitchinterval() == before_s
    assert folders
    assert not any(map(os.path.exists, folders))


def train(
    folder: Path, phase: str, *data: Any, callbacks: tuple[Callback, ...] = (), model: Any = Model, **options: Any
) -> Report:
    monitor, advisor = GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_steps=5, min_seconds=0.01)
    trainer = quiet_trainer(folder, callbacks=[monitor, advisor, *callbacks, Until(phase)], max_epochs=-1, **options)
    trainer.fit(model(), *data)
    assert trainer.global_step < MAX_STEPS
    return load_report(folder)


def functions(report: Report, phase: str) -> list[str]:
    return [one.function for one in report.lines if one.phase.startswith(phase)]


def test_the_loaders_line_is_named_everywhere(tmp_path: Path) -> None:
    report = train(tmp_path, DATA_LOADING, loader(Decoded(MAX_STEPS)))
    finding = next(one for one in report.diagnosis.findings if one.cause == "data_loading")
    line = str(finding.evidence["source_lines"])
    decode = f"{os.path.relpath(decoding.__file__)}:{decoding.LINE} in decode"
    assert line.startswith(f"{decode} (")
    assert f"% of the loader's time is at {decode}." in finding.advice
    (path,) = tmp_path.rglob("gpu_report.json")
    assert json.loads(path.read_text())["lines"][0]["function"] == "decode"
    assert main(["report", str(path), "--full"]) == 0


def test_a_callbacks_line_is_named(tmp_path: Path) -> None:
    report = train(tmp_path, CALLBACK, loader(Samples(MAX_STEPS)), callbacks=(Slow(),))
    finding = next(one for one in report.diagnosis.findings if one.cause == "callback")
    assert "trainings.py" in str(finding.evidence["source_lines"]).partition(",")[0]
    # A sample on a busy machine may see the line of one phase and the name of the next.
    phases = {one.phase for one in report.lines if one.function == "burn" and one.samples > 1}
    assert phases == {"callback/Slow"}


def test_a_loop_of_ones_own_names_its_lines(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
    with watch(folder=str(tmp_path), min_steps=5, min_seconds=0.01) as run:
        for batch in run.batches(loader(Decoded(MAX_STEPS))):
            optimizer.zero_grad()
            layer(batch).square().mean().backward()
            optimizer.step()
            assert run._training is not None
            if seen(run._training.session.recorder, DATA_LOADING) >= ENOUGH:
                break
    report = load_report(tmp_path)
    assert functions(report, DATA_LOADING)[0] == "decode"
    steps = {one.function for one in report.lines if one.phase.startswith("training_step")}
    assert steps <= {"test_a_loop_of_ones_own_names_its_lines"}


def test_a_training_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class Failing(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if sys.getswitchinterval() <= 2 * line_sampler.SWITCH_S:  # it is being sampled
                raise Boom
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    with pytest.raises(Boom):
        trainer.fit(Failing(), loader(Decoded(MAX_STEPS), num_workers=1))
