"""The monitor and the advisor in trainings of several real processes, on one node and on two."""

from __future__ import annotations

import csv
import json
import subprocess
import time
from pathlib import Path

import pytest
from fake_driver import Driver, gpu, process
from rank_processes import run_ranks, train_ranks, train_slow_ranks
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor
from lightning_gpu_tools.reports.report import load_report


def two_nodes(folder: Path, failing_rank: int | None = None) -> list[subprocess.CompletedProcess[str]]:
    machines = []
    for node in range(2):
        (folder / f"node{node}").mkdir()
        machines.append(Driver(folder / f"node{node}"))
        machines[node].gpus = [gpu(utilization=90 - 60 * node, processes=[process(4711, "3GiB")])]
    return train_ranks(folder, nodes=2, machines=machines, failing_rank=failing_rank, sample_s=(0.002, 0.012))


def test_rank_zero_reports_for_all_ranks(tmp_path: Path) -> None:
    results = train_ranks(tmp_path, sample_s=(0.02, 0.02), min_seconds=(0.1, 1e9))
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    assert [result.stdout.count("Verdict:") for result in results] == [1, 0]
    assert [result.stderr.count("Waiting for data takes") for result in results] == [1, 0]
    assert "reported nothing" not in results[0].stderr
    (report_file,) = tmp_path.rglob("gpu_report.json")
    report = load_report(report_file)
    assert report.settings["world_size"] == 2
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert report.phase_s["rank_wait/signal check"] > 0


def test_rank_zero_reports_every_node_and_the_slowest_rank(tmp_path: Path) -> None:
    results = two_nodes(tmp_path)
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    assert [result.stdout.count("Verdict:") for result in results] == [1, 0]
    (report_file,) = tmp_path.rglob("gpu_report.json")
    with (report_file.parent / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    own = [float(row["gpu/0/utilization_percent/mean"]) for row in rows if row.get("gpu/0/utilization_percent/mean")]
    name = "node1/gpu/0/utilization_percent/mean"
    other = {int(row["step"]): float(row[name]) for row in rows if row.get(name)}
    assert set(own) == {90.0}
    # Once an epoch; no rank waits for a node that has not published yet, so on a busy machine one can be missing.
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
    results = two_nodes(tmp_path, failing_rank)
    assert all(result.returncode != 0 for result in results)
    assert "Boom" in results[failing_rank].stderr
    report = load_report(next(tmp_path.rglob("gpu_report.json")))
    assert report.outcome.startswith("stopped by ")
    if failing_rank == 1:
        assert report.steps >= 45
    # What the other node published at the end of the first epoch is not lost.
    assert [one.node for one in report.gpus] == [0, 1]
    assert [rank.rank for rank in report.ranks] == [0, 1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_slow_rank_is_blamed_with_its_phase(tmp_path: Path, ranks: int) -> None:
    phases = ["data_loading", "forward", "backward", "optimizer", "callback"]
    slow_ranks = {"healthy": None, "checkpoint": 0, **{phase: i % ranks for i, phase in enumerate(phases)}}
    results = run_ranks(tmp_path, train_slow_ranks, ranks=ranks, options={"slow_ranks": slow_ranks})
    assert [result.returncode for result in results] == [0] * ranks, results[0].stderr
    blamed = json.loads((tmp_path / "blamed.json").read_text())
    assert blamed == {phase: [] if rank is None else [[rank, phase]] for phase, rank in slow_ranks.items()}


def test_gpus_are_compared_by_their_own_clock(tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    machine = Driver(tmp_path / "machine")
    machine.gpus = [gpu(utilization=0), gpu(utilization=0)]
    slow_ranks = {"healthy": None, "backward": 0, "optimizer": 1}
    options = {"slow_ranks": slow_ranks, "on_gpu": True, "steps": 120}
    results = run_ranks(tmp_path, train_slow_ranks, machines=[machine, machine], options=options)
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    blamed = json.loads((tmp_path / "blamed.json").read_text())
    assert blamed == {phase: [] if rank is None else [[rank, phase]] for phase, rank in slow_ranks.items()}


def test_a_spawned_process_gets_the_callbacks_and_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor()]
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, strategy="ddp_spawn")
    trainer.fit(Model(time.sleep, step_s=0.001), loader(Samples(30)))
    assert capfd.readouterr().out.count("Verdict:") == 1
    assert load_report(tmp_path).steps == 30
