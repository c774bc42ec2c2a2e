"""Measurements that resemble a cause, and the details of advice. Each cause itself is in test_each_cause.py."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import COPIES, LOADER, NO_WORKERS, STEP, WAITS, a_host, contended, cpu_run, gpu_run, watched

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Finding, top_lines
from lightning_gpu_tools.advice.lost_time import FIND_FUNCTION, idle_in_step, idle_in_step_share
from lightning_gpu_tools.training.phases import DATA_LOADING, FORWARD, IN_WORKER, OPTIMIZER
from lightning_gpu_tools.training.run_measurements import (
    CoreUser,
    LoadingFacts,
    RunMeasurements,
    SourceLine,
)


def validated(ms: float, **options: Any) -> RunMeasurements:
    """Return 200 steps of 20 ms, with a validation that takes so long per step."""
    return cpu_run({"training_step": 20, "validation": 4 * ms}, **{"validations": 20, **options})


PAGEABLE: dict[str, Any] = {"loader": replace(LOADER, pin_memory=False)}


def first(run: RunMeasurements) -> Finding:
    return diagnose(run).findings[0]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (gpu_run(STEP, 40.0, **watched(operations=1500)), "Use torch.compile(model"),
        (gpu_run(STEP, 40.0, **watched(operations=1500), recompiled=()), "Use mode='reduce-overhead' (CUDA graphs) in"),
        (gpu_run(**COPIES, **PAGEABLE), "Set DataLoader(pin_memory=True) (now False)"),
        (gpu_run(**COPIES), "uint8"),
        (
            cpu_run({"callback/StepLR.step": 20, "training_step": 5}),
            "StepLR.step faster, or run it 200 times less often.",
        ),
        (validated(5, validation_batches=20), "Make validation_step faster."),
        (validated(5, validation_loaders=(NO_WORKERS,), validation_wait_s=3.0), "num_workers=3, persistent_workers"),
        (validated(20, epochs=20, epoch_steps=10), "check_val_every_n_epoch=10)"),  # more would be too rare
    ],
)
def test_the_advice_fits_the_case(run: RunMeasurements, words: str) -> None:
    assert words in first(run).advice


@given(
    st.floats(1.0, 100.0), st.floats(0.0, 100.0), st.floats(0, 5000), st.sampled_from([None, 42]), st.integers(0, 200)
)
def test_idle_time_in_a_step_goes_to_one_reason_or_two(
    ms: float, utilization: float, operations: float, line: int | None, at_sync: int
) -> None:
    lines = tuple(seen(FORWARD, samples, number, file="train.py") for number, samples in ((42, at_sync), (50, 100)))
    run = gpu_run({"training_step": ms}, utilization, **watched(operations, line), lines=lines)
    idle = idle_in_step(run)
    assert sum(idle) == pytest.approx(idle_in_step_share(run))
    assert min(idle) >= 0
    by_syncs, by_launches, by_host_work = idle
    assert not (by_launches and by_host_work)
    assert by_syncs <= utilization / 100 + 1e-9  # a GPU that is idle is not waited for
    assert line is not None or not by_syncs


# --- loading -----------------------------------------------------------------------------------------------------


def test_a_wait_for_data_has_share_range_and_settings() -> None:
    """Steps of 40 ms keep their own 10, and what another process's batch adds."""
    run = cpu_run(WAITS)
    finding = first(run)
    assert (finding.cause, finding.evidence["kind"]) == ("data_loading", "too_few_workers")
    assert finding.share == pytest.approx(0.75)
    assert finding.ceiling == pytest.approx(40 / 10)
    assert finding.evidence["advised_num_workers"] == 4
    code = "DataLoader(..., num_workers=4, prefetch_factor=2, persistent_workers=True) (now 0, None, False)"
    assert finding.advice.startswith(f"Set {code}.")
    assert "NumWorkersFinder()" in finding.advice
    assert diagnose(run).next_step.endswith("Speedup: about 3.9x (3.4x to 5.5x).")


@pytest.mark.parametrize(
    ("cores", "after_ms"),
    [(8, 10), (2, 20), (1.5, 40 / 1.5)],  # from two cores on, 40 ms of CPU time are shared among them
)
def test_a_predicted_speedup_is_what_the_cores_allow(cores: float, after_ms: float) -> None:
    """Steps of 40 ms, 30 of them loading, all of it computing."""
    finding = first(cpu_run(WAITS, load_cpu_ms=30, cpu_ms=10, host=a_host(cores)))
    assert finding.evidence["kind"] == "too_few_workers"
    lower, expected, upper = (float(finding.evidence[f"speedup{end}"]) for end in ("_lower", "", "_upper"))
    assert expected == pytest.approx(40 / (1.02 * after_ms + 1))
    assert lower < expected < upper == pytest.approx(1.03 * 40 / (after_ms + 0.3))


@pytest.mark.parametrize(
    ("cores", "step_cores", "words"),
    [
        # Each second of loading is one that the step does not have.
        (1, 1, "The CPU is the limit: this job has 1 core. A batch takes 30 ms of CPU time, and a step 10 ms. Do less"),
        # 48 ms on two cores, and up to 25 more, because two threads compute in lockstep.
        (2, 1.8, "A batch takes 30 ms of CPU time, and a step 18 ms."),
    ],
)
def test_workers_that_hardly_help_are_not_advised(cores: float, step_cores: float, words: str) -> None:
    run = cpu_run(WAITS, load_cpu_ms=30, cpu_ms=10 * step_cores, host=a_host(cores))
    assert first(run).evidence["kind"] == "cpu_bound"
    assert "advised_num_workers" not in first(run).evidence
    assert words in first(run).advice
    assert "Without this wait: 4.0x." in diagnose(run).next_step


def test_a_loader_of_another_kind_gets_no_settings() -> None:
    finding = first(cpu_run(WAITS, loader=None))
    assert "kind" not in finding.evidence
    assert "num_workers" not in finding.advice


SLOW_WORKER = LoadingFacts(long_waits=30, ready_out_of_order_share=0.8)
ON_STORAGE = LoadingFacts(storage_wait_share=0.6)


@pytest.mark.parametrize(
    ("loading", "cpu_s", "kind", "words"),
    [
        (ON_STORAGE, 0.15, "too_few_workers", "num_workers="),  # computing for most of the time
        (SLOW_WORKER, None, "slow_worker", "prefetch_factor=4 (now 2)"),
        (replace(SLOW_WORKER, ready_out_of_order_share=0.2), None, "too_few_workers", "num_workers="),
        (LoadingFacts(runnable_share=0.9, delayed_share=0.3), None, "cpu_bound", "this job has 64 cores. Do less"),
    ],
)
def test_the_kind_follows_from_what_the_workers_do(
    loading: LoadingFacts, cpu_s: float | None, kind: str, words: str
) -> None:
    finding = first(gpu_run(WAITS, 25.0, loading=loading, worker_cpu_s_per_batch=cpu_s))
    assert finding.evidence["kind"] == kind
    assert words in finding.advice


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"load_cpu_ms": 3.2}, "healthy"),  # the time it takes to receive a batch
        ({"loading": LoadingFacts(ready_share=1.0)}, "healthy"),
        ({}, "low"),
    ],
)
def test_a_short_wait_for_what_lies_ready_is_no_finding(change: dict[str, Any], verdict: str) -> None:
    assert diagnose(cpu_run({"data_loading": 4, "training_step": 10}, **PAGEABLE, **change)).verdict == verdict


# --- the host ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("busy", "causes"), [(20.0, ["validation"]), (90.0, [])])
def test_validation_counts_only_with_an_idle_gpu(busy: float, causes: list[str]) -> None:
    run = cpu_run({"training_step": 60, "validation": 30}, validation_utilization_percent=busy)
    assert [finding.cause for finding in diagnose(run).findings] == causes


def test_the_file_system_of_slow_data_and_checkpoints_is_named() -> None:
    place = "/data/set is on nfs4"
    run = gpu_run(WAITS, 25.0, loading=ON_STORAGE, worker_cpu_s_per_batch=0.02, storage=place)
    assert f"of the polls. {place}. Pack" in first(run).advice
    assert f"Their folder {place}." in first(cpu_run({**STEP, "checkpoint": 30}, checkpoint_storage=place)).advice


# Source lines that a finding names


def seen(phase: str, samples: int, line: int = 41, **options: Any) -> SourceLine:
    return SourceLine(
        **{"phase": phase, "file": "data.py", "line": line, "function": "decode", "samples": samples, **options}
    )


def test_a_line_of_a_framework_is_no_advice() -> None:
    lines = [seen(OPTIMIZER, 30, file="lightning/pytorch/core/module.py")]
    assert top_lines(lines, OPTIMIZER) == ("lightning/pytorch/core/module.py:41 in decode (100%)", "")


def test_a_name_of_another_user_reaches_no_terminal_raw() -> None:
    shown = top_lines([seen(DATA_LOADING, 30, file="a\x1b[2J.py", function="\x1b[1m")], DATA_LOADING)
    assert "\x1b" not in "".join(map(str, shown))


@pytest.mark.parametrize(
    ("phase", "phase_ms", "options", "cause"),
    [
        (DATA_LOADING, WAITS, {}, "data_loading"),
        (IN_WORKER, WAITS, {"loader": replace(LOADER, num_workers=1), "worker_cpu_s_per_batch": 0.04}, "data_loading"),
        ("callback/A", {"callback/A": 20, "training_step": 20}, {}, "callback"),
        ("unexplained", {"unexplained": 20, "training_step": 20}, {}, "unexplained"),
    ],
)
def test_a_finding_on_the_host_names_its_line(
    phase: str, phase_ms: Mapping[str, float], options: dict[str, Any], cause: str
) -> None:
    others = [seen("elsewhere", 1000, line=2), seen("callback/B", 1000, line=3)]
    diagnosis = diagnose(cpu_run(phase_ms, lines=(*others, seen(phase, 62), seen(phase, 38, line=57)), **options))
    first = diagnosis.findings[0]
    assert first.cause == cause
    assert first.evidence["source_lines"] == "data.py:41 in decode (62%), data.py:57 in decode (38%)"
    time = "the loader's time" if cause == "data_loading" else "this time"
    assert f"62% of {time} is at data.py:41 in decode." in first.advice
    assert first.advice in diagnosis.next_step


def test_a_line_that_is_known_need_not_be_looked_for() -> None:
    phase_ms = {**STEP, "unexplained": 14}
    unknown = diagnose(cpu_run(phase_ms)).findings[0]
    known = diagnose(cpu_run(phase_ms, lines=(seen("unexplained", 40),))).findings[0]
    assert FIND_FUNCTION in unknown.advice
    assert known.advice == "100% of this time is at data.py:41 in decode."


# Waits for a CPU core: who uses the cores, and which other causes they replace


EVE = CoreUser(user="eve", name="train\x1b[31m", cores=1.1)
SIMULATORS = CoreUser(user="", name="sim\x1b", cores=1.1)


def test_a_gpu_loses_no_more_to_it_than_it_idles() -> None:
    cores = contended(0.5).cores
    busy, idle = (diagnose(gpu_run({"training_step": 50}, percent, cores=cores)) for percent in (95.0, 75.0))
    assert busy.verdict == "healthy"
    assert (idle.verdict, idle.findings[0].cause) == ("low", "cpu_contention")
    assert idle.findings[0].share == pytest.approx(0.25)


OTHERS = contended(others=1.2, other=EVE, workers=0, runnable_threads=1.0)  # of two threads, only one computes
POOLS = replace(contended(torch_threads=1), loading=LoadingFacts(runnable_threads=2.1))
QUOTA = contended(others=30.0, affinity_cores=64, machine_cores=64, workers=0)
USERS = {
    "other programs": (OTHERS, "other_programs", "Stop the other programs, or use a machine with free cores."),
    "children": (contended(others=0.8, children=SIMULATORS, other=EVE), "own_children", "start them with nice -n 19"),
    "threads": (contended(others=0.3, workers=0, torch_threads=16), "own_threads", "torch.set_num_threads(2) (now 16)"),
    "thread pools": (POOLS, "own_threads", "in worker_init_fn: torch.set_num_threads(1), with cv2"),
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
