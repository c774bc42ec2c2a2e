"""Loops without a Trainer under `watch`, also with Fabric.

What is a step, where its time goes, that nothing is left behind, and the other parts of the package under Fabric.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import code_in, finding_on
from lightning.fabric import Fabric
from own_loops import Network, traces
from rank_processes import run_ranks
from torch.utils.data import DataLoader
from trainings import Boom, HandClock, Samples, fault_in, loader

from lightning_gpu_tools import PortableCheckpointIO, load_weights, watch
from lightning_gpu_tools.reports.report import load_report
from lightning_gpu_tools.trainer.loop_timer import LoopTimer
from lightning_gpu_tools.types import TrainingWatch

TAIL = "callback/code after optimizer.step()"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = traces()
    yield
    assert traces() == before


def test_each_part_of_a_loop_has_its_phase(
    tmp_path: Path, hand_clock: HandClock, capsys: pytest.CaptureFixture[str]
) -> None:
    network, batches = Network(hand_clock.spend), loader(Samples(40, hand_clock.spend, 0.01))
    with watch(folder=str(tmp_path)) as run:
        for _ in range(2):
            for batch in run.batches(batches):
                network.backward(batch)
                hand_clock.spend(0.004)
                network.optimizer.step()
                hand_clock.spend(0.006)
            with run.phase("validation"):
                hand_clock.spend(0.7)
                network.step(batch)  # no part of a training step
            with run.phase("drawing"):
                hand_clock.spend(0.3)
            hand_clock.spend(0.5)
    report = load_report(tmp_path)
    assert {phase: seconds for phase, seconds in report.phase_s.items() if phase != "garbage_collection"} == {
        "data_loading": pytest.approx(78 * 0.01),
        "epoch_start": pytest.approx(2 * 0.01),
        "training_step/forward": pytest.approx(80 * 0.02),
        "training_step/backward": pytest.approx(80 * 0.03),
        "training_step": pytest.approx(80 * 0.004),
        "training_step/optimizer": pytest.approx(80 * 0.05),
        TAIL: pytest.approx(80 * 0.006),
        "validation": pytest.approx(2 * (0.7 + 0.1)),
        "callback/drawing": pytest.approx(2 * 0.3),
        "outside_loop": pytest.approx(2 * 0.5),
    }
    assert sum(report.phase_s.values()) == pytest.approx(report.wall_s)
    assert (report.steps, report.outcome) == (80, "completed")
    assert report.diagnosis.step_p95_s == pytest.approx(0.12)  # whatever comes between two epochs
    assert report.settings["num_workers"] == 0
    printed = capsys.readouterr().out
    assert "Verdict: " in printed
    assert "code after optimizer.step()" in printed
    assert run.diagnosis.verdict == report.diagnosis.verdict


def pairs(run: TrainingWatch, network: Network) -> None:
    for one, _ in zip(run.batches(loader(Samples(30))), run.batches(loader(Samples(30))), strict=True):
        network.step(one)


def nested_validation(run: TrainingWatch, network: Network) -> None:
    for number, batch in enumerate(run.batches(loader(Samples(30)))):
        network.step(batch)
        if number % 10 == 9:
            with torch.no_grad():
                for one in run.batches(loader(Samples(5))):
                    network.forward(one)


def validation_with_gradients(run: TrainingWatch, network: Network) -> None:
    held_out = loader(Samples(5))
    for _ in range(3):
        for batch in run.batches(loader(Samples(10))):
            network.step(batch)
        for one in run.batches(held_out):
            network.forward(one)


def breaks(run: TrainingWatch, network: Network) -> None:
    for _ in range(3):
        for number, batch in enumerate(run.batches(loader(Samples(1000)))):
            network.step(batch)
            if number == 9:
                break


def accumulation(run: TrainingWatch, network: Network) -> None:
    for number, batch in enumerate(run.batches(loader(Samples(30)))):
        network.backward(batch)
        if number % 3 == 2:
            network.optimizer.step()


def two_optimizers(run: TrainingWatch, network: Network) -> None:
    second = Network(network.spend)
    for batch in run.batches(loader(Samples(30))):
        network.step(batch)
        second.step(batch)
        network.spend(0.006)


# The seconds of some phases.
SHAPES: dict[Callable[[TrainingWatch, Network], None], dict[str, float]] = {
    pairs: {"training_step/forward": 30 * 0.02},
    nested_validation: {"training_step/forward": 30 * 0.02, "validation": 15 * 0.02},
    # A first batch may train.
    validation_with_gradients: {"training_step/forward": (30 + 1) * 0.02, "validation": (15 - 1) * 0.02},
    breaks: {"training_step/forward": 30 * 0.02},
    accumulation: {"training_step/forward": 30 * 0.02},
    # In the first step it is not known yet that there is a second one.
    two_optimizers: {
        "training_step/optimizer": 2 * 30 * 0.05,
        "training_step/forward": (2 * 30 - 1) * 0.02,
        TAIL: 30 * 0.006 + 0.02,
    },
}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_a_step_lasts_from_batch_to_batch_in_every_loop(
    tmp_path: Path, hand_clock: HandClock, shape: Callable[[TrainingWatch, Network], None]
) -> None:
    with watch(folder=str(tmp_path)) as run:
        shape(run, Network(hand_clock.spend))
    report = load_report(tmp_path)
    assert report.steps == (31 if shape is validation_with_gradients else 30)
    assert {phase: report.phase_s[phase] for phase in SHAPES[shape]} == pytest.approx(SHAPES[shape])
    assert sum(report.phase_s.values()) == pytest.approx(report.wall_s)
    assert report.unseen == ()
    assert report.settings["accumulate_grad_batches"] == (3 if shape is accumulation else 1)


def failing_loader() -> Iterable[torch.Tensor]:
    for number in range(100):
        if number == 25:
            raise Boom("a broken file")
        yield torch.ones(1, 4)


def train(
    folder: Path, batches: Iterable[torch.Tensor], fail_at: int | None = None, error: type[BaseException] = Boom
) -> list[float]:
    """Train two epochs, and return the weights."""
    torch.manual_seed(0)
    network = Network()
    with watch(folder=str(folder), min_steps=1, min_seconds=0) as run:
        for _ in range(2):
            for number, batch in enumerate(run.batches(batches)):
                if number == fail_at:
                    raise error("of the user's")
                network.step(batch)
    return [number for weight in network.layer.parameters() for number in weight.flatten().tolist()]


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_a_loop_or_a_loader_that_fails_is_reported(tmp_path: Path, error: type[BaseException] | None) -> None:
    with pytest.raises(error or Boom):
        train(tmp_path, loader(Samples(100)) if error else failing_loader(), 25 if error else None, error or Boom)
    report = load_report(tmp_path)
    assert report.outcome == f"stopped by {(error or Boom).__name__} at step 25"
    assert report.steps == (26 if error else 25)


@pytest.mark.follows("no batch was measured. Iterate over run.batches(loader).")
def test_without_a_batch_there_is_no_report(tmp_path: Path) -> None:
    run = watch(folder=str(tmp_path)).__enter__()
    with pytest.warns(UserWarning, match=r"no batch was measured") as warned:
        run.__exit__(None, None, None)
    assert run.diagnosis is None
    assert not list(tmp_path.iterdir())
    advised = code_in(str(warned[0].message), r"Iterate over (.*)\.$")
    with watch(folder=str(tmp_path)) as run:
        assert len([*eval(advised, {"run": run, "loader": loader(Samples(3))})]) == 3
    assert load_report(tmp_path).steps == 3


def test_disabled_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: Any) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_DISABLE", "1")
    before = traces()
    with watch(folder=str(tmp_path)) as run:
        for _ in run.batches(loader(Samples(30))):
            with run.phase("validation"):
                assert traces() == before
    assert run.diagnosis is None
    assert not list(tmp_path.iterdir())
    assert not recwarn.list


OURS = [LoopTimer.__init__, LoopTimer._backward_begins, TrainingWatch._finish]


@pytest.mark.follows("watch() is off, without a report")
@pytest.mark.filterwarnings("ignore::lightning_gpu_tools.errors.LowGPUUtilizationWarning")
@pytest.mark.parametrize("function", OURS, ids=lambda function: function.__qualname__)
def test_a_fault_of_ours_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]
) -> None:
    batches, off = loader(Samples(40)), "because of an internal error: RuntimeError: ours"
    with monkeypatch.context() as disabled:
        disabled.setenv("LIGHTNING_GPU_TOOLS_DISABLE", "1")
        as_usual = train(tmp_path, batches)
    with fault_in(function, lambda: RuntimeError("ours")) as raised, pytest.warns(UserWarning, match=off) as warned:
        assert train(tmp_path, batches) == as_usual
    assert raised
    assert len([one for one in warned if off in str(one.message)]) == 1
    with fault_in(function, lambda: RuntimeError("ours")), pytest.warns(UserWarning, match=off), pytest.raises(Boom):
        train(tmp_path, batches, fail_at=30)


def test_nothing_of_the_loops_is_kept_alive(tmp_path: Path) -> None:
    network, batches = Network(), loader(Samples(100), num_workers=1)
    ends, others = [weakref.ref(network.optimizer), weakref.ref(batches)], set(multiprocessing.active_children())
    gc.disable()
    try:
        with watch(folder=str(tmp_path)) as run:
            for batch in run.batches(batches):
                network.step(batch)
                break
            assert set(multiprocessing.active_children()) <= others
        del network, batches, batch
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


# With Fabric

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


@pytest.mark.parametrize("family", FAMILIES)
def test_fabrics_calls_are_phases_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hand_clock: HandClock, family: str
) -> None:
    logged: list[dict[str, float]] = []

    def log_metrics(self: Any, metrics: dict[str, float], step: int | None = None) -> None:
        hand_clock.spend(0.003)
        logged.append(metrics)

    logger = importlib.import_module(f"{family}.loggers").CSVLogger(tmp_path)
    monkeypatch.setattr(type(logger), "log_metrics", log_metrics)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args, **kwargs: hand_clock.spend(0.004))
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
        "logging/CSVLogger": pytest.approx(40 * 0.003),
    }
    assert report.settings["precision"] == "32-true"
    assert {"lightning", "lightning_fabric"} & set(report.settings) == {family.partition(".")[0]}
    with watch(fabric) as run:
        for _ in range(2):
            for _ in run.batches(fabric.setup_dataloaders(loader(Samples(25), num_workers=1))):
                hand_clock.spend(0.01)
    assert load_report(logger.log_dir).unseen == ()
    assert len([metrics for metrics in logged if "gpu_tools/waiting_share" in metrics]) == 2


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
        straggler = finding_on(report, "straggler")
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
