"""A Lightning or a torch without one of the names that are private or may change: only we miss it, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from trainings import Model, Samples, hide, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor
from lightning_gpu_tools.reports.report_file import load_report
from lightning_gpu_tools.trainer import compat, wrappers
from lightning_gpu_tools.trainer.measuring_callback import FitSession
from lightning_gpu_tools.training import compat as torch_compat
from lightning_gpu_tools.training.rank_exchange import Board, RankExchange, RankPlace


def train(folder: Path, *callbacks: Callback) -> tuple[Trainer, list[torch.Tensor]]:
    seed_everything(0)
    model = Model()
    trainer = quiet_trainer(folder, callbacks=[*callbacks], log_every_n_steps=5)
    trainer.fit(model, loader(Samples(30), num_workers=1, shuffle=True), loader(Samples(2)))
    return trainer, [weight.detach().clone() for weight in model.parameters()]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    return train(tmp_path_factory.mktemp("alone"))[1]


ITERATOR = "_MultiProcessingDataLoaderIter"


@pytest.mark.parametrize(
    ("module", "gone", "unseen"),
    [
        (wrappers, "on_run_end", "_FitLoop.on_run_end"),
        (wrappers, "on_advance_start", "_FitLoop.on_advance_start"),
        (wrappers, "on_advance_end", "_FitLoop.on_advance_end"),
        (wrappers, "epoch_loop", "_FitLoop.epoch_loop"),
        (wrappers, "val_loop", "_TrainingEpochLoop.val_loop"),
        (wrappers, "advance", "_FitLoop.advance"),
        (wrappers, "save_checkpoint", "Trainer.save_checkpoint"),
        (wrappers, "profile", "PassThroughProfiler.profile"),
        (compat, "_batches_that_stepped", None),  # the optimizer's step is nearly always the same
        (compat, "_data_fetcher", "the DataLoader's iterator"),
        (compat, "_combined_loader", "the DataLoader's iterator"),
        (compat, "_iterator", "the DataLoader's iterator"),
        (torch_compat, "_workers", f"{ITERATOR}._workers"),
        (torch_compat, "_task_info", f"{ITERATOR}._task_info"),
        (torch_compat, "_data_queue", f"{ITERATOR}._data_queue"),
    ],
)
def test_training_goes_on_and_the_report_names_the_unseen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: list[torch.Tensor],
    module: ModuleType,
    gone: str,
    unseen: str | None,
) -> None:
    hide(monkeypatch, module, gone)
    trainer, trained = train(tmp_path, GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0, min_steps=1))
    assert all(map(torch.equal, trained, weights))
    report = load_report(tmp_path)
    assert unseen is None or unseen in report.unseen
    assert report.steps == (0 if gone == "epoch_loop" else 30)  # fetches are called there
    assert sum(report.phase_s.values()) == pytest.approx(report.wall_s)
    assert "run" not in vars(trainer.fit_loop.epoch_loop)  # every wrapper is off


def test_a_fit_whose_start_is_unseen_has_no_report(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: list[torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    hide(monkeypatch, wrappers, "on_run_start")
    _, trained = train(tmp_path, GPUUtilizationMonitor(), GPUUtilizationAdvisor())
    assert "has no report, because this version of Lightning lacks _FitLoop.on_run_start" in capsys.readouterr().out
    assert all(map(torch.equal, trained, weights))


@pytest.mark.parametrize(
    ("gone", "unseen"),
    [
        ("_start_profiler", "_PrefetchDataFetcher._start_profiler"),
        ("_evaluation_step", "_EvaluationLoop._evaluation_step"),
        ("on_run_end", "_EvaluationLoop.on_run_end"),
    ],
)
def test_an_evaluation_goes_on_and_its_report_names_the_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str, unseen: str
) -> None:
    hide(monkeypatch, wrappers, gone)
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    trainer.test(Model(), loader(Samples(30)), verbose=False)
    report = load_report(tmp_path)
    assert unseen in report.unseen
    assert (report.steps, report.outcome) == (0 if gone == "_start_profiler" else 30, "completed")
    assert "_evaluation_step" not in vars(trainer.test_loop)


def test_an_evaluation_whose_start_is_unseen_has_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, wrappers, "_on_predict_epoch_start")
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    assert len(trainer.predict(Model(), loader(Samples(3)))) == 3
    words = "has no report, because this version of Lightning lacks _PredictionLoop._on_predict_epoch_start"
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("gone", ["nothing", "automatic_optimization"])
def test_each_step_is_noticed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    noticed = []
    after_step = FitSession.after_step

    def counted(session: FitSession, batch: Any) -> None:
        noticed.append((session.clock.steps, len(batch)))
        after_step(session, batch)

    hide(monkeypatch, wrappers, gone)
    monkeypatch.setattr(FitSession, "after_step", counted)
    train(tmp_path, GPUUtilizationMonitor(), GPUUtilizationAdvisor())
    assert noticed == [(step, 1) for step in range(1, 31)]


@pytest.fixture
def store() -> Iterator[Any]:
    """A real store in which torch.distributed was started."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    torch.distributed.destroy_process_group()


def test_ranks_that_cannot_meet_are_deaf_and_not_stuck(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = RankPlace(rank=0, world_size=2, local_ranks=2)
    assert RankExchange("seen", place, torch_compat.default_store()).ranks == 2
    hide(monkeypatch, torch_compat, "_get_default_store")
    exchange = RankExchange("unseen", place, torch_compat.default_store())
    exchange.publish(own_step=None)
    assert exchange.ranks == 1
    exchange.finish(60.0)
    assert [entry["rank"] for entry in exchange.entries()] == [0]


@pytest.mark.parametrize("gone", ["nothing", "clone"])
def test_ranks_have_a_connection_of_their_own(store: Any, monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    hide(monkeypatch, torch_compat, gone)
    first, second = (Board("stalls", RankPlace(rank, 2, rank, 0, 2), torch_compat.own_store()) for rank in range(2))
    second.post(step=7)
    first.read([1])
    assert first.entries[1]["step"] == 7


def test_ranks_that_met_in_a_file_have_no_other_connection(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert torch_compat.own_store() is None
    finally:
        torch.distributed.destroy_process_group()


def test_a_precision_set_for_cuda_alone_does_not_end_the_measuring(tmp_path: Path) -> None:
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch before 2.9 has one way to set it")
    before = torch.backends.cuda.matmul.fp32_precision
    assert torch_compat.matmul_precision() == "highest"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert torch_compat.matmul_precision() == "high"
        train(tmp_path, GPUUtilizationAdvisor(min_steps=5, min_seconds=0), GPUUtilizationMonitor())
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert load_report(tmp_path).steps == 30
