"""Fabric under `watch`: its phases, loggers, ranks and GPUs; and the other parts of the package under Fabric."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from own_loops import Network, traces
from rank_processes import run_ranks
from torch.utils.data import DataLoader
from trainings import HandClock, Samples, loader

from lightning_gpu_tools import PortableCheckpointIO, load_weights, watch
from lightning_gpu_tools.reports.report import load_report

FAMILIES = ["lightning.fabric", "lightning_fabric"]


class Batch:
    """A batch that takes its time to get to a device."""

    def __init__(self, samples: torch.Tensor, clock: HandClock) -> None:
        self.samples, self.clock = samples, clock

    def to(self, *args: Any, **kwargs: Any) -> Batch:
        self.clock.spend(0.02)
        return self


class SlowToSave:
    def __init__(self, clock: HandClock) -> None:
        self.clock = clock

    def __reduce__(self) -> Any:
        self.clock.spend(0.08)
        return int, ()


def recording_logger(family: str, folder: Path, clock: HandClock) -> Any:
    """Return a logger that takes its time and keeps what it is given."""

    class Recording(importlib.import_module(f"{family}.loggers").CSVLogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__(folder)
            self.logged: list[tuple[dict[str, float], int | None]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            clock.spend(0.003)
            self.logged.append((metrics, step))

    return Recording()


@pytest.mark.parametrize("family", FAMILIES)
def test_fabrics_calls_are_phases_of_their_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hand_clock: HandClock,
    family: str,
) -> None:
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args, **kwargs: hand_clock.spend(0.004))
    logger = recording_logger(family, tmp_path, hand_clock)
    fabric = importlib.import_module(family).Fabric(accelerator="cpu", devices=1, loggers=[logger])
    fabric.launch()
    network = Network(hand_clock.spend)
    model, optimizer = fabric.setup(network.layer, network.optimizer)
    samples = Samples(40, hand_clock.spend, 0.01)
    given = DataLoader(samples, collate_fn=lambda one: Batch(torch.stack(one), hand_clock))
    batches = fabric.setup_dataloaders(given)
    before = traces(), dict(vars(fabric)), dict(vars(given))
    with watch(fabric) as run:
        for number, batch in enumerate(run.batches(batches)):
            loss = network.forward(batch.samples)
            loss.register_hook(lambda gradient: hand_clock.spend(0.03))
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            fabric.log("loss", 0.0, step=number)
            if number == 30:
                fabric.save(tmp_path / "last.ckpt", {"model": model, "slow": SlowToSave(hand_clock)})
    assert (traces(), dict(vars(fabric)), dict(vars(given))) == before
    assert not {"log_metrics", "save"} & set(vars(logger))
    report = load_report(logger.log_dir)
    assert {phase: seconds for phase, seconds in report.phase_s.items() if phase != "garbage_collection"} == {
        "data_loading": pytest.approx(39 * 0.01),
        "epoch_start": pytest.approx(0.01),
        "host_to_device_copy": pytest.approx(40 * 0.02),
        "training_step/forward": pytest.approx(40 * 0.02),
        "training_step/backward": pytest.approx(40 * 0.03),
        "training_step/gradient_clipping": pytest.approx(40 * 0.004),
        "training_step/optimizer": pytest.approx(40 * 0.05),
        "checkpoint": pytest.approx(0.08),
        "logging/Recording": pytest.approx(40 * 0.003),
    }
    assert report.settings["precision"] == "32-true"
    assert {"lightning", "lightning_fabric"} & set(report.settings) == {family.partition(".")[0]}
    with watch(fabric) as run:
        for _ in range(2):
            for _ in run.batches(fabric.setup_dataloaders(loader(Samples(25), num_workers=1))):
                hand_clock.spend(0.01)
    assert load_report(logger.log_dir).unseen == ()
    summary = [metrics for metrics, _ in logger.logged if "gpu_tools/waiting_share" in metrics]
    assert len(summary) == 2


def train_ranks(folder: Path, rank: int) -> None:
    """Train in a plain loop, then with Fabric; the rank of the second node loads slowly."""

    def train(run: Any, batches: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, backward: Any) -> None:
        with run:
            for _ in range(2):
                for batch in run.batches(batches):
                    backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()

    def slow(steps: int) -> DataLoader[torch.Tensor]:
        return loader(Samples(steps, time.sleep, 0.03 * (rank == 1)))

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    options: dict[str, Any] = {"min_steps": 10, "min_seconds": 0.1}
    run = watch(folder=str(folder / "plain"), **options)
    train(run, slow(20), model, torch.optim.SGD(model.parameters(), lr=1e-6), torch.Tensor.backward)

    fabric = Fabric(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp")
    fabric.launch()
    layer = torch.nn.Linear(4, 1)
    wrapped, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=1e-6))
    run = watch(fabric, folder=str(folder / "fabric"), **options)
    train(run, fabric.setup_dataloaders(slow(40)), wrapped, optimizer, fabric.backward)


def test_the_ranks_of_a_loop_make_one_report(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, train_ranks, nodes=2)
    assert [result.returncode for result in results] == [0, 0], "".join(result.stderr for result in results)
    assert [result.stdout.count("Verdict:") for result in results] == [2, 0]
    for name in ("plain", "fabric"):
        report = load_report(tmp_path / name)
        assert report.settings["world_size"] == 2
        assert [(one.rank, one.node) for one in report.ranks] == [(0, 0), (1, 1)]
        assert {"data_loading", "forward", "backward", "optimizer"} <= set(report.ranks[1].phase_s)
        straggler = next(one for one in report.diagnosis.findings if one.cause == "straggler")
        assert (straggler.evidence["who"], straggler.evidence["phase"]) == ("rank 1", "data_loading")


def test_what_fabric_has_set_up_is_saved_and_loaded(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[PortableCheckpointIO()])
    assert type(fabric.strategy.checkpoint_io) is PortableCheckpointIO
    given, other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    wrapped = fabric.setup(torch.nn.DataParallel(given))
    fabric.save(tmp_path / "last.ckpt", {"model": wrapped, "step": 3})
    for target in (fabric.setup(other), fabric.setup(torch.compile(other))):
        with torch.no_grad():
            other.weight.zero_()
        load_weights(target, tmp_path / "last.ckpt")
        assert torch.equal(other.weight, given.weight)
    with torch.no_grad():
        given.weight.zero_()
    assert fabric.load(tmp_path / "last.ckpt", {"model": wrapped})["step"] == 3
    assert torch.equal(given.weight, other.weight)
