"""The monitor on two nodes: two real processes that train together on the CPU, each over its own fake driver."""

import csv
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_driver import Driver, gpu, process

from lightning_gpu_tools.reports.report import load_report

SCRIPT = """
import os, sys, time
from pathlib import Path
from lightning.pytorch.loggers import CSVLogger
from trainings import Model, Raise, Samples, loader, quiet_trainer
from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor

folder, failing_rank = Path(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["RANK"])
callbacks = [GPUUtilizationMonitor(interval_s=0.02, devices="all"), GPUUtilizationAdvisor(min_seconds=0.1)]
if rank == failing_rank:
    callbacks.append(Raise(at_step=45))
trainer = quiet_trainer(
    folder, callbacks=callbacks, logger=CSVLogger(folder, version=0), devices=1, num_nodes=2, strategy="ddp",
    max_epochs=2, log_every_n_steps=10,
)
trainer.fit(Model(), loader(Samples(2 * 40, time.sleep, 0.002 + 0.01 * rank)))
print(f"rank {rank} done")
"""


def two_nodes(tmp_path: Path, failing_rank: int = -1) -> Iterator[subprocess.CompletedProcess[str]]:
    """Run one process a node, as torchrun would."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for node in range(2):
        machine = Driver(tmp_path / f"node{node}")
        machine.gpus = [gpu(utilization=90 - 60 * node, processes=[process(4711, "3GiB")])]
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
        ranks = {"WORLD_SIZE": "2", "RANK": str(node), "LOCAL_RANK": "0", "GROUP_RANK": str(node)}
        env = machine.env({**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}, **rendezvous, **ranks)
        command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path), str(failing_rank)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        children.append(subprocess.Popen(command, env=env, text=True, **pipes))  # type: ignore[call-overload]
    for child in children:
        stdout, stderr = child.communicate(timeout=100)
        yield subprocess.CompletedProcess(child.args, child.returncode, stdout, stderr)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for node in range(2):
        (tmp_path / f"node{node}").mkdir()


def test_rank_zero_logs_and_reports_every_node_and_names_the_slowest_rank(tmp_path: Path) -> None:
    results = list(two_nodes(tmp_path))
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    assert [result.stdout.count("Verdict:") for result in results] == [1, 0]
    (report_file,) = tmp_path.rglob("gpu_report.json")
    with (report_file.parent / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    own = [float(row["gpu/0/utilization_percent/mean"]) for row in rows if row.get("gpu/0/utilization_percent/mean")]
    name = "node1/gpu/0/utilization_percent/mean"
    other = {int(row["step"]): float(row[name]) for row in rows if row.get(name)}
    assert set(own) == {90.0}
    # Once an epoch; nobody waits for a node that has not spoken yet, so on a busy machine one of them can be missing.
    assert other
    assert other.keys() <= {39, 79}
    assert set(other.values()) == {30.0}
    report = load_report(report_file)
    assert [(one.node, one.index, one.utilization_percent_mean) for one in report.gpus] == [(0, 0, 90), (1, 0, 30)]
    fast, slow = report.ranks
    assert (slow.rank, slow.node) == (1, 1)
    assert slow.own_step_s > fast.own_step_s + 0.008
    straggler = next(finding for finding in report.diagnosis.findings if finding.cause == "straggler")
    assert (straggler.evidence["rank"], straggler.evidence["node"]) == (1, 1)
    assert straggler.evidence["phase"] == "data_loading"
    assert straggler.evidence["behind_ms_per_step"] > 8
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("Slowest rank: "))
    assert line.startswith("Slowest rank: 1 (node 1), ")


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_fails_leaves_nobody_waiting(tmp_path: Path, failing_rank: int) -> None:
    results = list(two_nodes(tmp_path, failing_rank))  # in time, or communicate() fails
    assert all(result.returncode != 0 for result in results)
    assert "Boom" in results[failing_rank].stderr
    report = load_report(next(tmp_path.rglob("gpu_report.json")))
    assert report.outcome.startswith("stopped by ")
    if failing_rank == 1:
        assert report.steps >= 45
    # What the other node told at the end of the first epoch is not lost.
    assert [one.node for one in report.gpus] == [0, 1]
    assert [rank.rank for rank in report.ranks] == [0, 1]
