"""Steps that record CUDA graphs or replay them: nothing of the measurement gets into a graph, and it goes on after."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from toys import occupy
from trainings import Samples, loader

from lightning_gpu_tools import load_report, watch
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.training import gpu_timeline
from lightning_gpu_tools.training.phases import BACKWARD, FORWARD, OPTIMIZER

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
    assert report.gpu_step_s[FORWARD] == pytest.approx(WORK_S, rel=0.1)
    assert not {BACKWARD, OPTIMIZER} & {*report.gpu_step_s}
    assert "the parts of a step inside a CUDA graph" in report.unseen
    assert "the parts of a step inside a CUDA graph" in " ".join(render_text(report).split())
