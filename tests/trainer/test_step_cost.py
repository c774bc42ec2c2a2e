"""The cost of monitor and advisor in a training step, counted in calls of functions, which no busy machine changes.

How long these take is measured by ``benchmarks/step_overhead.py`` and ``benchmarks/scale.py``.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from trainings import Model, Samples, loader, quiet_trainer

import lightning_gpu_tools
from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports.report_file import ReportFile
from lightning_gpu_tools.runs import run_report, session
from lightning_gpu_tools.trainer.measuring_callback import STEP_HOOKS
from lightning_gpu_tools.trainer.wrappers import Wrappers, before

PACKAGE = str(Path(lightning_gpu_tools.__file__).parent)
FROM, STEPS = 120, 100  # after the warm-up and the first judgment


class Calls:
    """Counts the calls of Python functions in this thread while it is entered."""

    def __init__(self) -> None:
        self.all = self.ours = 0

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.all += 1
            self.ours += frame.f_code.co_filename.startswith(PACKAGE)

    def __enter__(self) -> Calls:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


class Empty(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        pass


class Counted(Model):
    """Counts the calls of 100 steps."""

    calls = Calls()

    def _count(self, batch_idx: int) -> None:
        if batch_idx == FROM:
            self.calls = Calls().__enter__()
        if batch_idx == FROM + STEPS:
            self.calls.__exit__()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._count(batch_idx)
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self._count(batch_idx)
        return super().predict_step(batch, batch_idx)


def calls_of(callbacks: list[Callback], folder: Path, every: int) -> Calls:
    trainer = quiet_trainer(folder, callbacks=callbacks, logger=CSVLogger(folder), log_every_n_steps=every)
    model = Counted()
    trainer.fit(model, loader(Samples(FROM + STEPS + 1)))
    return model.calls


def test_a_step_makes_fewer_calls_than_with_two_empty_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_LOG_EVERY_S", 60.0)  # else slow steps log more often
    counted = {}
    for every in (50, 1):
        empty = calls_of([Empty(), Empty()], tmp_path / f"empty {every}", every)
        # Without the running report, which is measured every so many seconds and not steps.
        callbacks = [GPUUtilizationMonitor(report=False, interval_s=60.0), GPUUtilizationAdvisor()]
        counted[every] = calls_of(callbacks, tmp_path / f"ours {every}", every)
        assert empty.ours == 0
        assert counted[every].all < empty.all
    assert 10 < counted[50].ours / STEPS < 60
    # Around the logger; hardly one asks whether to log. 3, and more where other programs have the cores.
    assert (counted[1].ours - counted[50].ours) / STEPS < 10


def test_a_predicted_batch_makes_fewer_calls_than_with_two_empty_callbacks(tmp_path: Path) -> None:
    class EmptyToo(Callback):
        def on_predict_batch_end(self, *args: Any) -> None:
            pass

    counted = {}
    for name, callbacks in {
        "empty": [EmptyToo(), EmptyToo()],
        "ours": [GPUUtilizationMonitor(report=False, interval_s=60.0), GPUUtilizationAdvisor()],
    }.items():
        model = Counted()
        quiet_trainer(tmp_path, callbacks=callbacks).predict(model, loader(Samples(FROM + STEPS + 1)))
        counted[name] = model.calls
    assert counted["ours"].all < counted["empty"].all
    assert 10 < counted["ours"].ours / STEPS < 60


class Loop:
    def run(self) -> str:
        return "run"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="every object has its __dict__ from the start")
def test_a_wrapped_method_leaves_the_others_of_its_object_cached() -> None:
    loop, wrappers, ran = Loop(), Wrappers(), []
    for number in range(2):
        wrappers.put(loop, "run", partial(before, partial(ran.append, number)))
    assert loop.run() == "run"
    wrappers.undo()
    assert loop.run() == "run"
    assert ran == [1, 0]
    assert not any(isinstance(one, dict) for one in gc.get_referents(loop))  # CPython makes it when it is asked for
    assert vars(loop) == {}


def gpus_of_node(node: int) -> list[dict[str, Any]]:
    """Return the GPUs as the first rank of another node publishes them."""
    gpus = [asdict(GpuSummary(index=i, uuid=f"GPU-{node:08x}-{i:04x}", node=node)) for i in range(8)]
    return json.loads(json.dumps(gpus))  # type: ignore[no-any-return]


class OnRankZeroOf1024(Callback):
    """Has heard of 1,016 GPUs of other nodes, and counts the calls of the training thread when the report is due."""

    def __init__(self, monitor: GPUUtilizationMonitor, written: threading.Event) -> None:
        self.monitor, self.written = monitor, written
        self.calls = Calls()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        own, running = self.monitor._session, self.monitor._running
        assert own is not None
        assert running is not None
        if trainer.global_step == 20:
            own.ranks.exchange._board.entries |= {
                8 * node: {"rank": 8 * node, "node": node, "pid": node, "gpus": gpus_of_node(node)}
                for node in range(1, 128)
            }
            self.written.clear()
            with self.calls:
                running.measure()
            assert self.written.wait(60)


def test_a_running_report_of_1024_ranks_is_made_beside_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, reports, save = threading.Event(), [], ReportFile.save

    def saved(file: ReportFile, report: Any) -> Any:
        path = save(file, report)
        reports.append((threading.get_ident(), load_report(path)))
        if len(report.gpus) == 1016:
            written.set()
        return path

    monkeypatch.setattr(run_report, "FIRST_WRITE_S", 1000.0)  # only when this test asks
    monkeypatch.setattr(ReportFile, "save", saved)
    monitor = GPUUtilizationMonitor()
    rank_zero = OnRankZeroOf1024(monitor, written)
    quiet_trainer(tmp_path, callbacks=[monitor, rank_zero]).fit(Model(), loader(Samples(30)))
    threads = {thread for thread, report in reports if len(report.gpus) == 1016 and not report.is_finished}
    assert threads
    assert threading.get_ident() not in threads
    assert rank_zero.calls.ours < 1016  # not even one for each GPU


def test_lightning_calls_no_hook_of_a_step_that_does_nothing(tmp_path: Path) -> None:
    class Overridden(GPUUtilizationAdvisor):
        backwards = 0

        def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
            super().on_after_backward(trainer, pl_module)
            self.backwards += 1

    class Seen(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
            self.shown = [
                [name for name in STEP_HOOKS if callable(getattr(one, name))] for one in trainer.callbacks[:2]
            ]

    advisor, seen = Overridden(min_steps=1, min_seconds=0), Seen()
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor(), advisor, seen])
    trainer.fit(Model(), loader(Samples(40)))
    assert seen.shown == [["on_validation_batch_start"], ["on_after_backward"]]
    assert advisor.backwards == 40
    assert advisor.diagnosis is not None
    assert all(callable(getattr(one, name)) for one in trainer.callbacks[:2] for name in STEP_HOOKS)
