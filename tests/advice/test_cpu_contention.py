"""Waits for a CPU core: when they are reported, who uses the cores, and which other causes they replace."""

from __future__ import annotations

import dataclasses

import pytest
from measured_runs import run_of

from lightning_gpu_tools.advice.causes import CAUSES
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.examples import a_host, contended, cpu_run, gpu_run, ranks
from lightning_gpu_tools.training.run_measurements import CoreUser, LoadingFacts, RankStep, RunMeasurements

EVE = (CoreUser(user="eve", name="train\x1b[31m", cores=1.1), CoreUser(user="root", name="cron", cores=0.01))
SIMULATORS = (
    CoreUser(user="ada", name="sim\x1b", cores=0.9, processes=3),
    CoreUser(user="ada", name="ffmpeg", cores=0.2),
)
WAITS = {"data_loading": 30.0, "training_step/forward": 10.0}


@pytest.mark.parametrize(("share", "verdict"), [(0.09, "healthy"), (0.11, "low")])
def test_no_run_is_healthy_that_waited_for_a_core_for_a_tenth(share: float, verdict: str) -> None:
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
    assert diagnosis.findings[0].evidence["phases"] == "training_step"


USERS = {
    "other programs": (
        contended(others=1.2, users=EVE, workers=0, runnable_threads=1.0),
        "other_programs",
        r"per step; other programs keep 1.2 of 2 cores busy: eve's train\x1b[31m 1.1)",
        "Next: Stop the other programs",
    ),
    "threads on the cores of others": (
        contended(others=1.2, users=EVE, workers=0, runnable_threads=2.0),
        "other_programs",
        r"this job has 2.0 runnable threads, and other programs keep 1.2 of 2 cores busy: eve's train\x1b[31m 1.1)",
        "Next: Use fewer threads: torch.set_num_threads(1) (now 2). Stop the other programs",
    ),
    "a nice job": (contended(others=1.2, niceness=10), "other_programs", "busy)", "start it without nice"),
    "a few of them": (
        contended(others=0.3, runnable_threads=1.9, users=EVE),
        "other_programs",
        "other programs keep 0.3 of 2 cores busy: eve's",
        "Stop the other programs",
    ),
    "own": (contended(others=0.3, workers=0), "own_threads", "5.2", "py-spy dump"),
    "children": (
        contended(others=0.1, children=SIMULATORS, machine_cores=64),
        "own_children",
        r"4 child processes of this job (sim\x1b, ffmpeg) use 1.1 of 2 cores)",
        "Allow it more cores (taskset, docker run --cpuset-cpus). Start them with nice -n 19, so that training",
    ),
    "a child and other programs": (
        contended(others=0.8, children=SIMULATORS[:1], users=EVE, workers=0),
        "own_children",
        "3 child processes of this job (sim\\x1b) use 0.9 of 2 cores; other programs keep 0.8 of 2 cores busy: eve's",
        "Start at most 1 of them (now 3), or start them with nice -n 19, so that training goes first. Stop the other",
    ),
    "thread pools": (
        contended(loading=LoadingFacts(runnable_threads=2.1, pool_library="cv2"), torch_threads=1),
        "own_threads",
        "5.2",
        "Each of the 4 workers keeps 2.1 threads runnable, on 2 cores. Limit their libraries to one thread in "
        "worker_init_fn: cv2.setNumThreads(0), torch.set_num_threads(1), and for NumPy threadpoolctl.threadpool_limits",
    ),
    "quota": (
        contended(throttled_share=0.38, quota_cores=2.0),
        "quota",
        "a quota allows 2 cores, and paused this job in 38 % of its periods",
        "Raise the quota",
    ),
    "less than a core": (
        contended(throttled_share=0.38, quota_cores=0.5, workers=0, torch_threads=2),
        "quota",
        "a quota allows 0.5 cores",
        "Use fewer threads: torch.set_num_threads(1) (now 2). Speedup",
    ),
    "workers": (contended(throttled_share=0.05, quota_cores=2.0), "own_threads", "5.2", "num_workers=1 (now 4)"),
    "threads": (
        contended(workers=0, torch_threads=16),
        "own_threads",
        "this job has 5.2 runnable threads on 2 cores",
        "torch.set_num_threads(2) (now 16).",
    ),
    "SLURM": (
        contended(machine_cores=64, runnable_threads=15.4, in_slurm=True),
        "affinity",
        "15.4 runnable threads and may use 2 of 64 cores",
        "Add --cpus-per-task=16 to sbatch or srun.",
    ),
    "affinity": (contended(machine_cores=64, workers=0, torch_threads=1), "affinity", "2 of 64", "taskset"),
    "unknown": (contended(workers=0, torch_threads=1, runnable_threads=1.4), "own_threads", "1.4", "py-spy dump"),
}


@pytest.mark.parametrize(("run", "kind", "why", "advice"), USERS.values(), ids=USERS)
def test_the_users_of_the_cores_and_a_change_are_named(run: RunMeasurements, kind: str, why: str, advice: str) -> None:
    diagnosis = diagnose(run)
    assert diagnosis.findings[0].evidence["kind"] == kind
    assert "Waiting for a CPU core takes 40 % of the wall time (16 ms per step; " in diagnosis.why
    assert why in diagnosis.why
    assert advice in f"Next: {diagnosis.next_step}"
    assert "cron" not in diagnosis.why


def test_more_ranks_than_cores_are_advised_against() -> None:
    run = dataclasses.replace(contended(torch_threads=1, workers=0), host=a_host(2, local_ranks=4))
    assert "at most 2 ranks on this machine (now 4)" in diagnose(run).next_step


def test_a_wait_for_workers_without_a_core_is_not_blamed_on_loading() -> None:
    """Training waits 75 % of the time for workers that have no core for half of it, of which others have taken half."""
    loading = LoadingFacts(runnable_share=1.0, delayed_share=0.5)
    run = contended(0.02, others=1.0, phase_ms=WAITS, loading=loading)
    of = {one.cause: one for one in diagnose(run).findings}
    assert of["cpu_contention"].share == pytest.approx(0.02 + 0.75 / 4)
    assert of["cpu_contention"].evidence["phases"] == "data_loading"
    assert of["data_loading"].share == pytest.approx(0.75 * 3 / 4)
    alone = contended(0.02, phase_ms=WAITS, loading=loading)  # these workers are in each other's way
    assert [one.cause for one in diagnose(alone).findings] == ["data_loading"]
    throttled = contended(0.02, throttled_share=0.9, quota_cores=2.0, phase_ms=WAITS, loading=loading)
    assert diagnose(throttled).findings[0].cause == "cpu_contention"


def test_loading_in_the_training_thread_counts_without_its_wait_for_a_core() -> None:
    cores = contended(0.75, others=1.0).cores
    delayed = {"load_core_wait_ms": 30, "load_cpu_ms": 0.0}, {"load_core_wait_ms": 1, "load_cpu_ms": 29}
    quick, slow = (cpu_run({"data_loading": 30, "training_step": 10}, cores=cores, **ms) for ms in delayed)
    assert [one.cause for one in diagnose(quick).findings] == ["cpu_contention"]
    assert {one.cause for one in diagnose(slow).findings} == {"cpu_contention", "data_loading"}


@pytest.mark.parametrize(
    ("core_wait_s", "shares"),
    [
        (0.0, {"communication": 0.3}),
        (0.001, {"communication": 0.275}),
        (0.012, {"cpu_contention": 0.6}),  # each waits as long as the other has no core
    ],
)
def test_ranks_that_share_cores_do_not_blame_the_network(core_wait_s: float, shares: dict[str, float]) -> None:
    two = ranks(*[{"backward": 0.03}] * 2, wait_s=0.012, core_wait_s=core_wait_s)
    run = contended(core_wait_s / 0.04, **two)
    assert {one.cause: one.share for one in diagnose(run).findings} == pytest.approx(shares)


def test_a_rank_without_a_core_is_named_with_the_reason() -> None:
    two = tuple(RankStep(rank=i, node=i, own_step_s=0.03 * (i + 1), core_wait_s=0.03 * i) for i in range(2))
    (finding,) = diagnose(gpu_run({"training_step": 60}, 99.0, ranks=two)).findings
    assert finding.cause == "straggler"
    assert "waits 30 ms per step for a core (median rank: 0 s)" in finding.advice


def test_findings_that_missing_cores_explain_are_not_reported() -> None:
    """Irregular slow steps, and long work without a name, need no other reason; what has a rule keeps its own."""
    times = [{"training_step": 0.4 if step in (30, 47, 61, 99, 140) else 0.02} for step in range(1, 301)]
    irregular = run_of(times)
    assert [one.cause for one in diagnose(irregular).findings] == ["slow_steps"]
    with_cores = dataclasses.replace(irregular, cores=contended(0.5, others=1.0).cores)
    assert [one.cause for one in diagnose(with_cores).findings] == ["cpu_contention"]
    unnamed = contended(0.4, phase_ms={"training_step/forward": 30.0, "trainer": 10.0})
    assert [one.cause for one in diagnose(unnamed).findings] == ["cpu_contention"]
    named = contended(0.4, phase_ms={"training_step/forward": 20.0, "callback/A": 20.0})
    assert {one.cause for one in diagnose(named).findings} == {"cpu_contention", "callback"}


@pytest.mark.parametrize(
    ("file", "causes"), [("train.py", {"cpu_contention", "host_work"}), ("torch/nn.py", {"cpu_contention"})]
)
def test_work_of_the_host_at_no_line_of_the_program_may_be_the_wait_for_a_core(file: str, causes: set[str]) -> None:
    run = CAUSES["host_work"].sick
    lines = tuple(dataclasses.replace(one, file=file) for one in run.lines)
    waiting = dataclasses.replace(run, cores=contended(0.9).cores, lines=lines)
    assert {one.cause for one in diagnose(waiting).findings} == causes
