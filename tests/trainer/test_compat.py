"""A Lightning or a torch without one of the names that are private or may change: only we miss it, and say so."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from trainings import Model, Samples, hide, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, patches
from lightning_gpu_tools.reports.report import load_report
from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.training import compat as torch_compat
from lightning_gpu_tools.training.rank_exchange import RankExchange, RankPlace


def train(folder: Path, *callbacks: Callback) -> tuple[Trainer, list[torch.Tensor]]:
    seed_everything(0)
    model = Model()
    trainer = quiet_trainer(folder, callbacks=[*callbacks], log_every_n_steps=5)
    trainer.fit(model, loader(Samples(30), num_workers=1, shuffle=True), loader(Samples(2)))
    return trainer, [weight.detach().clone() for weight in model.parameters()]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    return train(tmp_path_factory.mktemp("alone"))[1]


@pytest.mark.parametrize(
    ("module", "gone", "unseen"),
    [
        (patches, "on_run_end", "_FitLoop.on_run_end"),
        (patches, "profile", "PassThroughProfiler.profile"),
        (compat, "_batches_that_stepped", None),  # the optimizer's step is nearly always the same
        (compat, "_iterator", None),
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
    assert report.steps == 30
    assert sum(report.phase_s.values()) == pytest.approx(report.wall_s)
    assert "run" not in vars(trainer.fit_loop.epoch_loop)  # every wrapper is off


def test_a_fit_whose_start_is_unseen_has_no_report(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: list[torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    hide(monkeypatch, patches, "on_run_start")
    _, trained = train(tmp_path, GPUUtilizationMonitor(), GPUUtilizationAdvisor())
    assert "has no report, because this version of Lightning lacks _FitLoop.on_run_start" in capsys.readouterr().out
    assert all(map(torch.equal, trained, weights))


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
