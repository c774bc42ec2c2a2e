"""Steps that record CUDA graphs or replay them: nothing of the measurement gets into a graph, and it goes on after."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from lightning.pytorch import Callback, Trainer
from torch._dynamo.utils import get_compilation_metrics
from toys import occupy
from trainings import Model, Samples, Spending, Watch, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report, watch
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.trainer.measuring_callback import FitSession
from lightning_gpu_tools.training import gpu_timeline
from lightning_gpu_tools.training.phases import BACKWARD, CAPTURED, FORWARD, OPTIMIZER

STEPS = 60
WORK_S = 0.005


@pytest.fixture(autouse=True)
def _samples_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SAMPLE_EVERY", "_SAMPLE_LATER_EVERY", "_SKIPPED"):
        monkeypatch.setattr(gpu_timeline, name, 1)


def nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Return the number of operations in a graph that was recorded with ``keep_graph=True``."""
    count = ctypes.c_size_t()
    assert ctypes.CDLL(None).cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)) == 0
    return count.value


class Training:
    """A whole training step on a batch that stays in its place."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1).cuda()
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=1e-3)
        self.batch = torch.ones(1, 4, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # the warm-up that a graph needs
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        occupy(WORK_S)
        self.layer(self.batch).square().mean().backward()
        self.optimizer.step()

    def recorded(self, **options: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(**options)
        with torch.cuda.graph(graph):
            self.step()
        return graph


def test_a_recorded_graph_has_the_same_operations_as_without_the_monitor(tmp_path: Path) -> None:
    """Samples of every kind are taken of the steps that record it."""
    training = Training()
    without = nodes(training.recorded(keep_graph=True))
    with watch(folder=tmp_path) as run:
        found = [nodes(training.recorded(keep_graph=True)) for _ in run.batches(loader(Samples(STEPS)))]
    assert found == [without] * STEPS
    assert load_report(tmp_path).unseen == ()


def test_a_replayed_step_is_measured_as_one_part(tmp_path: Path) -> None:
    training, graph = Training(), None
    with watch(folder=tmp_path) as run:
        for batch in run.batches(loader(Samples(3 * STEPS))):
            training.batch.copy_(batch)
            graph = graph or training.recorded()
            graph.replay()
    report = load_report(tmp_path)
    assert report.gpu_step_s[CAPTURED] == pytest.approx(WORK_S, rel=0.1)
    assert not {BACKWARD, OPTIMIZER} & {*report.gpu_step_s}
    assert "the parts of a step inside a CUDA graph" in report.unseen
    assert "the parts of a step inside a CUDA graph" in " ".join(render_text(report).split())
    assert "CUDA graph" in render_text(report, full=True)


class Eager(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        occupy(WORK_S)
        return self.layer(batch).square().mean() / 1e4


class Records(Callback):
    """Records some steps from before they begin until after they have ended."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.recorded = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 10 == 9:
            self.graph = torch.cuda.graph(torch.cuda.CUDAGraph())
            self.graph.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        if self.graph is not None:
            self.graph.__exit__(None, None, None)
            self.graph = None
            self.recorded += 1


def test_the_sampling_goes_on_after_steps_that_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_timeline, "_NEW_ORIGIN_S", 0.0)  # as after a minute
    seen, records, slow = Watch(), Records(), Spending(time.sleep, "on_train_batch_end", 0.020)
    trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=[seen, records, slow])
    trainer.fit(Eager(), loader(Samples(STEPS)))
    idle = seen.clock.gpu_idle()
    assert records.recorded == STEPS // 10
    assert seen.timer.memory.failure is None
    assert idle.samples > STEPS / 2
    assert idle.work_s[FORWARD] == pytest.approx(WORK_S, rel=0.1)
    assert max(idle.idle_s, key=idle.idle_s.__getitem__) == "callback/Spending"


class Graphed(Model):
    """A model whose forward and backward are graphs of their own."""

    def on_fit_start(self) -> None:
        sample = torch.zeros(1, 4, device="cuda", requires_grad=False)
        self.layer = torch.cuda.make_graphed_callables(self.layer, (sample,))


def test_graphed_callables_are_measured_as_forward_and_backward(tmp_path: Path) -> None:
    seen = Watch()
    trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=[seen])
    trainer.fit(Graphed(), loader(Samples(2 * STEPS)))
    assert {FORWARD, BACKWARD, OPTIMIZER} <= {*seen.clock.gpu_idle().step_s}
    assert seen.clock.replays == 2 * 2 * STEPS


@pytest.mark.parametrize(("model", "is_recorded"), [(Eager, True), (Graphed, False)])
def test_allocations_that_graphs_keep_predict_no_largest_batch(
    tmp_path: Path, model: type[Model], is_recorded: bool
) -> None:
    trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=[GPUUtilizationMonitor(report=False)])
    session = FitSession.of(trainer, Callback())
    trainer.fit(model(), loader(Samples(10)))
    assert session.timer.memory.failure is None
    assert bool(session.timer.memory.recorded) is is_recorded


def test_compiled_code_that_waits_for_the_gpu_is_compiled_once(tmp_path: Path) -> None:
    """Lines that wait are recorded in some of the steps."""
    training, compiled = Training(), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        loss = training.layer(batch).square().mean()
        torch.cuda.synchronize()  # before torch 2.14, code that waits is compiled in two parts
        return loss * 2

    def step(batch: torch.Tensor) -> None:
        loss_of(batch.cuda()).backward()
        training.optimizer.step()

    torch._dynamo.reset()
    step(torch.zeros(1, 4))
    without = len(compiled)
    torch._dynamo.reset()
    before = len(get_compilation_metrics())
    with watch(folder=tmp_path) as run:
        for batch in run.batches(loader(Samples(STEPS))):
            step(batch)
    assert len(compiled) == 2 * without
    metrics = get_compilation_metrics()[before:]
    assert len(metrics) == without
    assert "loss_of" in metrics[0].co_name
