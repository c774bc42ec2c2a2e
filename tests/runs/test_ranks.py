"""The monitor and the advisor in trainings of several real processes, on one node and on two."""

import csv
import subprocess
import time
from pathlib import Path

import pytest
import torch
from fake_driver import Driver, gpu, process
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from rank_processes import run_ranks, train_on_two_nodes
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, PortableCheckpointIO
from lightning_gpu_tools.reports.report import load_report
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS

# How much longer a sample takes on the second node.
SLOWER_S = 0.06


def two_nodes(folder: Path, *, slower_s: float, fails: bool = False) -> list[subprocess.CompletedProcess[str]]:
    machines = []
    for node in range(2):
        (folder / f"node{node}").mkdir()
        machines.append(Driver(folder / f"node{node}"))
        machines[node].gpus = [gpu(utilization=90 - 60 * node, processes=[process(4711, "3GiB")])]
    options = {"slower_s": slower_s, "fails": fails}
    return run_ranks(folder, train_on_two_nodes, nodes=2, machines=machines, options=options)


def test_rank_zero_reports_every_node_and_the_slowest_rank(tmp_path: Path) -> None:
    results = two_nodes(tmp_path, slower_s=SLOWER_S)
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    assert [result.stdout.count("Verdict:") for result in results] == [1, 0]
    assert [result.stderr.count("Waiting for rank 1 takes") for result in results] == [1, 0]
    assert "did not report" not in results[0].stderr
    (report_file,) = tmp_path.rglob("gpu_report.json")
    with (report_file.parent / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    own = [float(row["gpu/0/utilization_percent/mean"]) for row in rows if row.get("gpu/0/utilization_percent/mean")]
    name = "node1/gpu/0/utilization_percent/mean"
    other = {int(row["step"]): float(row[name]) for row in rows if row.get(name)}
    assert set(own) == {90.0}
    assert set(other.values()) == {30.0}
    report = load_report(report_file)
    assert [(one.node, one.index, one.utilization_percent_mean) for one in report.gpus] == [(0, 0, 90), (1, 0, 30)]
    assert [bool(one.timelines) for one in report.gpus] == [True, False]
    assert report.settings["world_size"] == 2
    assert report.unseen == ()
    is_asked = hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor")  # since Lightning 2.5.2
    assert (report.phase_s.get("rank_wait/signal check", 0) > 0) == is_asked
    assert [(one.rank, one.node) for one in report.ranks] == [(0, 0), (1, 1)]
    straggler = next(finding for finding in report.diagnosis.findings if finding.cause == "straggler")
    assert (straggler.evidence["rank"], straggler.evidence["node"]) == (1, 1)
    assert straggler.evidence["phase"] == "data_loading"
    assert straggler.evidence["behind_ms_per_step"] > 500 * SLOWER_S
    assert "\nSlowest rank: 1 (node 1), " in results[0].stdout


def test_a_rank_that_fails_leaves_nobody_waiting(tmp_path: Path) -> None:
    results = two_nodes(tmp_path, slower_s=0.01, fails=True)
    assert all(result.returncode != 0 for result in results)
    assert "Boom" in results[1].stderr, results[0].stderr
    report = load_report(next(tmp_path.rglob("gpu_report.json")))
    assert report.outcome.startswith("stopped by ")
    assert report.steps > WARM_UP_STEPS
    # What the other node published before is not lost.
    assert [one.node for one in report.gpus] == [0, 1]
    assert [rank.rank for rank in report.ranks] == [0, 1]


class Wrapped(Model):
    def __init__(self) -> None:
        super().__init__(time.sleep, step_s=0.001)
        self.layer = torch.compile(self.layer, backend="eager")  # type: ignore[assignment]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # else a step may be too small for float32


def test_a_spawned_process_reports_and_its_weights_come_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor()]
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, strategy="ddp_spawn", plugins=[PortableCheckpointIO()])
    model = Wrapped()
    before = next(model.parameters()).detach().clone()
    trainer.fit(model, loader(Samples(30)))
    assert capfd.readouterr().out.count("Verdict:") == 1
    assert load_report(tmp_path).steps == 30
    assert not torch.equal(before, next(model.parameters()))
