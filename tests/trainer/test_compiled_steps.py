"""Code of torch.compile in measured trainings: compiled as without the measurement, and said when compiled again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from advised import finding_on
from torch._dynamo.utils import counters, get_compilation_metrics
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report, watch

STEPS = 40

Backend = Callable[..., Any]


def compiled_by(train: Callable[[Backend], object]) -> tuple[list[list[str]], list[str], int]:
    """Return what torch.compile makes of a training that uses the backend it is given.

    These are the operations of each graph, the functions, and the number of breaks.
    """
    torch._dynamo.reset()
    counters.clear()
    before, graphs = get_compilation_metrics()[-1:], []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    train(backend)
    metrics = get_compilation_metrics()
    new = metrics[metrics.index(before[0]) + 1 :] if before else metrics
    return graphs, [str(one.co_name) for one in new], sum(counters["graph_break"].values())


class Unlogged(Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean() / 1e4
        return loss


def test_the_monitor_does_not_change_how_a_module_compiles(tmp_path: Path) -> None:
    def fit(backend: Backend, *callbacks: Any) -> None:
        model = torch.compile(Unlogged(), backend=backend)
        quiet_trainer(tmp_path, callbacks=[*callbacks]).fit(model, loader(Samples(STEPS)))  # type: ignore[arg-type]

    expected = compiled_by(fit)
    assert expected[0]
    assert compiled_by(lambda backend: fit(backend, GPUUtilizationMonitor())) == expected


def test_a_recompiled_function_is_named_with_the_reason(tmp_path: Path) -> None:
    torch._dynamo.reset()
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return net(batch).square().mean()

    compiled, line = torch.compile(loss_of, backend="eager"), loss_of.__code__.co_firstlineno
    with (
        torch._dynamo.config.patch(automatic_dynamic_shapes=False, cache_size_limit=64),  # a name that all torch know
        watch(folder=tmp_path, min_steps=10, min_seconds=0.001) as run,
    ):
        for batch in run.batches([torch.ones(1 + step % 8, 4) for step in range(3 * STEPS)]):
            compiled(batch).backward()
            optimizer.step()
    found, report = finding_on(run, "recompilation"), load_report(tmp_path)
    assert found.evidence["recompilations"] == 7
    assert found.evidence["source_lines"].endswith(f"test_compiled_steps.py:{line} in loss_of (100%)")
    if hasattr(get_compilation_metrics()[-1], "recompile_reason"):  # since torch 2.7
        assert "size mismatch at index 0. expected" in str(found.evidence["reason"])
        assert "mark_dynamic(batch, 0)" in found.advice
    assert 0.0 < found.evidence["recompile_s"] <= report.wall_s
    assert found.share == pytest.approx(found.evidence["recompile_s"] / report.wall_s)
