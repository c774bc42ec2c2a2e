"""Waits for a CPU core: when they are reported, who uses the cores, and which other causes they replace."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.examples import a_host, contended, gpu_run
from lightning_gpu_tools.training.run_measurements import CoreUser, LoadingFacts, RunMeasurements

EVE = CoreUser(user="eve", name="train\x1b[31m", cores=1.1)
SIMULATORS = CoreUser(user="", name="sim\x1b", cores=1.1)


@pytest.mark.parametrize(("share", "verdict"), [(0.09, "healthy"), (0.11, "low")])
def test_waiting_for_cores_a_tenth_of_the_time_is_unhealthy(share: float, verdict: str) -> None:
    diagnosis = diagnose(contended(share))
    assert diagnosis.verdict == verdict
    assert [(one.cause, one.share) for one in diagnosis.findings] == [("cpu_contention", share)] * (verdict == "low")


def test_a_gpu_loses_no_more_to_it_than_it_idles() -> None:
    cores = contended(0.5).cores
    busy, idle = (gpu_run({"training_step": 50}, percent, cores=cores) for percent in (95.0, 75.0))
    assert diagnose(busy).verdict == "healthy"
    diagnosis = diagnose(idle)
    assert (diagnosis.verdict, diagnosis.findings[0].cause) == ("low", "cpu_contention")
    assert diagnosis.findings[0].share == pytest.approx(0.25)
    assert diagnosis.findings[0].evidence["phase"] == "training_step"


OTHERS = contended(others=1.2, other=EVE, workers=0, runnable_threads=1.0)  # of two threads, only one computes
POOLS = contended(loading=LoadingFacts(runnable_threads=2.1, pool_library="cv2"), torch_threads=1)
QUOTA = contended(others=30.0, affinity_cores=64, machine_cores=64, workers=0)
USERS = {
    "other programs": (OTHERS, "other_programs", "Stop the other programs, or use a machine with free cores."),
    "children": (contended(others=0.8, children=SIMULATORS, other=EVE), "own_children", "start them with nice -n 19"),
    "threads": (contended(others=0.3, workers=0, torch_threads=16), "own_threads", "torch.set_num_threads(2) (now 16)"),
    "thread pools": (POOLS, "own_threads", "worker_init_fn: cv2.setNumThreads(0), torch.set_num_threads(1)"),
    "own workers": (contended(), "own_threads", "torch.set_num_threads(1) (now 2), num_workers=1 (now 4)."),
    "a quota beside other programs": (QUOTA, "own_threads", "give it more of the 64 cores: sbatch --cpus-per-task"),
}


@pytest.mark.parametrize(("run", "kind", "advice"), USERS.values(), ids=USERS)
def test_the_users_of_the_cores_and_a_change_are_named(run: RunMeasurements, kind: str, advice: str) -> None:
    diagnosis = diagnose(run)
    assert diagnosis.findings[0].evidence["kind"] == kind
    assert "Waiting for a CPU core takes 40% of the wall time (16 ms per step; " in diagnosis.why
    assert advice in diagnosis.next_step


def test_names_of_other_programs_are_escaped() -> None:
    assert r"other programs keep 1.2 of 2 cores busy, eve's train\x1b[31m 1.1 of them)" in diagnose(OTHERS).why
    assert r"(sim\x1b) use 1.1 of 2 cores)" in diagnose(USERS["children"][0]).why


def test_more_ranks_than_cores_are_advised_against() -> None:
    run = dataclasses.replace(contended(torch_threads=1, workers=0), host=a_host(2, local_ranks=4))
    assert "at most 2 ranks on this machine (now 4)" in diagnose(run).next_step
