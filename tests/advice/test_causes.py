"""Every cause of the diagnosis, on measurements that have it and on similar ones that do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_runs import GIB, LOADER, a_host, cpu_run, gpu_run, looks

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.advice.inside_step import batch_size_that_fits, wants_profile
from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training.run_measurements import (
    GpuFacts,
    LoadingFacts,
    ProfiledSteps,
    RankStep,
    RunMeasurements,
)


def first(run: RunMeasurements) -> Finding:
    return diagnose(run).findings[0]


def test_an_event_too_rare_to_be_sampled_counts_in_full() -> None:
    run = gpu_run({"checkpoint": 30, "training_step": 70}, 60.0, gpu_idle=looks(training_step=(0.0, 0.0)))
    assert first(run).cause == "checkpoint"
    assert first(run).share == pytest.approx(0.3)


# --- inside the step ---------------------------------------------------------------------------------------------


def test_copies_from_pageable_memory_need_pinned_memory() -> None:
    pageable = dataclasses.replace(LOADER, pin_memory=False)
    run = gpu_run(
        {"host_to_device_copy": 20, "training_step": 30},
        60.0,
        gpu_idle=looks(host_to_device_copy=(20.0, 19.0)),
        loader=pageable,
        batch_bytes=190_000_000,
    )
    finding = first(run)
    assert finding.cause == "host_to_device_copy"
    assert finding.share == pytest.approx(19 / 50)
    assert finding.evidence["bytes_per_second"] == pytest.approx(1e10)
    assert "pin_memory=True (now False)" in finding.advice
    pinned = dataclasses.replace(run, loader=LOADER)
    assert "pin_memory" not in first(pinned).advice
    assert "uint8" in first(pinned).advice


def test_tensors_left_on_the_cpu_are_named() -> None:
    run = gpu_run(
        {"host_to_device_copy": 20, "training_step": 30},
        60.0,
        gpu_idle=looks(host_to_device_copy=(20.0, 19.0)),
        left_on_cpu=("LitModel.weights (a list of 3 tensors)",),
    )
    assert "LitModel.weights" in first(run).advice
    assert "register_buffer" in first(run).advice


PROFILE = ProfiledSteps(
    steps=3,
    wall_s=0.15,
    kernels_per_step=400,
    kernel_median_us=80.0,
    syncs_per_step=2.0,
    sync_lines=("train.py:42",),
    idle_s={"sync": 0.09, "launch": 0.01},
)


def test_a_sync_is_named_by_its_source_line() -> None:
    run = gpu_run({"training_step": 50}, 50.0, profile=PROFILE)
    finding = first(run)
    assert finding.cause == "device_sync"
    assert finding.share == pytest.approx(0.45)
    assert finding.basis == "measured"
    assert "train.py:42" in finding.advice


def test_a_sync_without_a_gpu_trace_is_heuristic() -> None:
    run = gpu_run({"training_step": 50}, 50.0, profile=ProfiledSteps(steps=3, wall_s=0.15, syncs_per_step=1.0))
    assert first(run).cause == "device_sync"
    assert first(run).basis == "heuristic"


def test_short_kernels_with_gaps_between_them_are_launch_bound() -> None:
    profile = dataclasses.replace(PROFILE, kernel_median_us=6.0, syncs_per_step=0.0, idle_s={"launch": 0.1})
    finding = first(gpu_run({"training_step": 50}, 40.0, profile=profile))
    assert finding.cause == "launch_bound"
    assert finding.share == pytest.approx(0.6)
    assert "torch.compile" in finding.advice


def test_gaps_between_long_kernels_are_not_launch_bound() -> None:
    profile = dataclasses.replace(PROFILE, syncs_per_step=0.0, idle_s={"launch": 0.1})
    assert first(gpu_run({"training_step": 50}, 40.0, profile=profile)).cause == "unexplained"


def test_a_tiny_model_gets_one_finding() -> None:
    run = gpu_run({"training_step": 1.5, "callback/A": 0.2, "logging/B": 0.2, "trainer": 0.7}, 12.0)
    diagnosis = diagnose(run)
    (finding,) = diagnosis.findings
    assert finding.cause == "launch_bound"
    assert finding.basis == "heuristic"
    assert "too small for this GPU" in diagnosis.next_step
    slow_loader = gpu_run({"training_step": 1.0, "data_loading": 3.0}, 12.0)
    assert [one.cause for one in diagnose(slow_loader).findings] == ["data_loading"]


BUSY = GpuFacts(
    compute_capability=(9, 0),
    memory_total_bytes=80 * GIB,
    sm_active_percent=25.0,
    tensor_active_percent=20.0,
    step_memory_bytes=6 * GIB,
    kept_memory_bytes=2 * GIB,
)


def test_few_active_sms_ask_for_the_batch_that_fits() -> None:
    """4 GiB for 32 samples: beside 2 GiB of weights, 62 GiB of 80 hold 496."""
    assert batch_size_that_fits(BUSY, 32) == 496
    run = gpu_run({"training_step": 50}, 95.0, gpu=BUSY)
    finding = first(run)
    assert diagnose(run).verdict == "low"
    assert finding.cause == "small_batch"
    assert finding.share == pytest.approx(0.70)
    assert "batch_size=256 (now 32" in finding.advice
    full = dataclasses.replace(BUSY, step_memory_bytes=60 * GIB)
    assert diagnose(gpu_run({"training_step": 50}, 95.0, gpu=full)).findings[0].cause == "unexplained"


@given(st.integers(1, 2**40), st.integers(0, 2**36), st.integers(1, 2**36), st.integers(1, 4096), st.integers(0, 2**38))
def test_the_batch_that_fits_leaves_a_fifth_of_the_memory(
    total: int, kept: int, for_batch: int, batch_size: int, others: int
) -> None:
    gpu = GpuFacts(
        memory_total_bytes=total,
        kept_memory_bytes=kept,
        step_memory_bytes=kept + for_batch,
        others_memory_bytes=others,
    )
    fits = batch_size_that_fits(gpu, batch_size)
    if fits is not None:
        assert kept + others + fits * for_batch / batch_size <= 0.8 * total * (1 + 1e-9)


@pytest.mark.parametrize(
    ("capability", "words"), [((9, 0), "bf16-mixed"), ((7, 5), "overflow"), ((6, 1), None), (None, None)]
)
def test_unused_tensor_cores_are_a_remark_that_fits_the_hardware(
    capability: tuple[int, int] | None, words: str | None
) -> None:
    gpu = GpuFacts(compute_capability=capability, sm_active_percent=90.0, tensor_active_percent=0.0)
    diagnosis = diagnose(gpu_run({"training_step": 50}, 97.0, gpu=gpu))
    assert diagnosis.verdict == "healthy"
    assert [finding.cause for finding in diagnosis.findings] == (["low_precision"] if words else [])
    assert (words or "No change needed") in diagnosis.next_step


@pytest.mark.parametrize(
    "change", [{"precision": "bf16-mixed"}, {"gpu": dataclasses.replace(BUSY, sm_active_percent=90.0)}]
)
def test_tensor_cores_in_use_are_no_remark(change: dict[str, Any]) -> None:
    gpu = GpuFacts(compute_capability=(9, 0), sm_active_percent=90.0, tensor_active_percent=0.0)
    run = gpu_run({"training_step": 50}, 97.0, **{"gpu": gpu, **change})
    assert diagnose(run).findings == ()


def test_communication_that_nothing_hides_is_named() -> None:
    profile = dataclasses.replace(PROFILE, exposed_communication_s=0.06, syncs_per_step=0.0, idle_s={})
    run = gpu_run({"training_step": 50}, 95.0, gpu=BUSY, profile=profile)
    assert first(run).cause == "communication"
    assert first(run).share == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("phases", "utilization", "gpu", "wanted"),
    [
        ({"training_step": 50}, 50.0, None, True),  # idle inside the step
        ({"training_step": 50}, 96.0, None, False),  # busy
        ({"data_loading": 45, "training_step": 50}, 50.0, None, False),  # idle outside of it
        ({"training_step": 50}, 95.0, BUSY, True),  # looks busy
        ({"training_step": 2}, 10.0, None, False),  # tiny: nothing more to find out
        ({"training_step": 50}, None, None, False),  # nothing tells
    ],
)
def test_the_profiler_is_asked_only_where_nothing_else_can_tell(
    phases: dict[str, float], utilization: float | None, gpu: GpuFacts | None, wanted: bool
) -> None:
    assert wants_profile(gpu_run(phases, utilization, gpu=gpu)) is wanted
    assert not wants_profile(gpu_run(phases, utilization, gpu=gpu, profile=PROFILE))


# --- the GPU itself, and others on it ----------------------------------------------------------------------------


def test_heat_is_a_remark_with_the_clock_it_cost() -> None:
    hot = GpuFacts(thermal_throttled_percent=60.0, held_clock_percent=70.0)
    diagnosis = diagnose(gpu_run({"training_step": 50}, 100.0, gpu=hot))
    (finding,) = diagnosis.findings
    assert (diagnosis.verdict, finding.cause, finding.basis) == ("healthy", "thermal_throttling", "measured")
    assert finding.ceiling == pytest.approx(1 / (1 - 0.6 * 0.3))
    assert diagnose(gpu_run({"training_step": 50}, 100.0, gpu=GpuFacts(thermal_throttled_percent=4.0))).findings == ()


@pytest.mark.parametrize(
    ("capped", "clock", "utilization", "named"),
    [(80.0, 70.0, 99.0, True), (80.0, 95.0, 99.0, False), (40.0, 70.0, 99.0, False), (80.0, None, 99.0, False)],
)
def test_the_power_limit_matters_only_if_it_costs_much_clock(
    capped: float, clock: float | None, utilization: float, named: bool
) -> None:
    gpu = GpuFacts(power_capped_percent=capped, held_clock_percent=clock)
    causes = [finding.cause for finding in diagnose(gpu_run({"training_step": 50}, utilization, gpu=gpu)).findings]
    assert causes == (["power_cap"] if named else [])


@pytest.mark.parametrize(
    ("percent", "size", "shared"),
    [(40.0, 3 * GIB, True), (1.0, 3 * GIB, False), (None, 3 * GIB, True), (None, 2**20, False)],
)
def test_with_others_on_the_gpu_nothing_is_tuned(percent: float | None, size: int, shared: bool) -> None:
    gpu = GpuFacts(others_utilization_percent=percent, others_memory_bytes=size)
    diagnosis = diagnose(gpu_run({"data_loading": 50, "training_step": 50}, 30.0, gpu=gpu))
    assert (diagnosis.verdict == "shared_gpu") is shared
    assert [finding.cause for finding in diagnosis.findings][:1] == ["shared_gpu" if shared else "data_loading"]
    if shared:
        assert "3.00 GiB" in diagnosis.why
        assert diagnosis.next_step.startswith("Use a free GPU")
        assert "FreeMemoryCUDAAccelerator(exclusive=True)" in diagnosis.next_step


# --- ranks -------------------------------------------------------------------------------------------------------


def ranks(*phases: dict[str, float]) -> tuple[RankStep, ...]:
    return tuple(RankStep(rank=i, node=i // 2, own_s=sum(one.values()), phase_s=one) for i, one in enumerate(phases))


def test_a_straggler_is_named_with_its_phase() -> None:
    quick, slow = {"data_loading": 0.001, "forward": 0.010}, {"data_loading": 0.026, "forward": 0.010}
    run = gpu_run({"training_step": 50}, 99.0, ranks=ranks(quick, quick, quick, slow))
    diagnosis = diagnose(run)
    finding = diagnosis.findings[0]
    assert (diagnosis.verdict, finding.cause) == ("low", "straggler")
    assert finding.share == pytest.approx(0.5)
    assert (finding.evidence["rank"], finding.evidence["node"]) == (3, 1)
    assert finding.evidence["phase"] == "data_loading"
    assert "waiting for data" in finding.advice
    assert "rank 3" in diagnosis.why


def test_a_phase_is_blamed_only_if_it_covers_most() -> None:
    quick, slow = {"data_loading": 0.001, "forward": 0.010}, {"data_loading": 0.014, "forward": 0.022}
    finding = first(gpu_run({"training_step": 50}, 99.0, ranks=ranks(quick, slow)))
    assert "phase" not in finding.evidence
    assert "No single phase" in finding.advice


def test_ranks_of_equal_speed_are_no_cause() -> None:
    alike = {"forward": 0.010}, {"forward": 0.012}
    assert diagnose(gpu_run({"training_step": 50}, 99.0, ranks=ranks(*alike))).findings == ()


# --- loading -----------------------------------------------------------------------------------------------------

WAITS = {"data_loading": 30.0, "training_step": 10.0}


def workers(count: int) -> dict[str, Any]:
    return {"loader": dataclasses.replace(LOADER, num_workers=count, pin_memory=False)}


def test_a_wait_for_data_has_share_ceiling_and_settings() -> None:
    """Of 40 ms a step 11 remain: its own 10, and the millisecond that it takes to receive a batch."""
    finding = first(cpu_run(WAITS))
    assert (finding.cause, finding.evidence["kind"]) == ("data_loading", "too_few_workers")
    assert finding.share == pytest.approx(0.75)
    assert finding.ceiling == pytest.approx(40 / 11)
    assert finding.evidence["advised_num_workers"] == 4
    assert "num_workers=4 (now 0)" in finding.advice
    assert "NumWorkersFinder()" in finding.advice


@pytest.mark.parametrize(
    ("cores", "step_cores", "after_ms"),
    [
        (8, 1, 10),
        (2, 1, 20),  # 40 ms of CPU time on two cores
        (2, 2, 25),  # 50 ms on two cores
        (1.5, 1, 40 / 1.5),
        (1, 1, None),  # each second of loading is one that the step does not have
        (4, 4, 17.5),
    ],
)
def test_a_ceiling_is_what_the_cores_allow(cores: float, step_cores: float, after_ms: float | None) -> None:
    """Steps of 40 ms, 30 of them loading, all of it computing."""
    run = cpu_run(WAITS, load_cpu_ms=30, cpu_ms=30 + 10 * step_cores, host=a_host(cores))
    finding = first(run)
    if after_ms is None:
        assert finding.evidence["kind"] == "cpu_bound"
    else:
        assert finding.evidence["kind"] == "too_few_workers"
        assert finding.ceiling == pytest.approx(40 / (after_ms + 1))
        assert ("Then the cores are the limit: a batch takes 30 ms of CPU time" in finding.advice) == (cores < 8)


def test_a_step_on_all_cores_needs_a_worker_on_each() -> None:
    """One worker would delay a step that computes in lockstep on both cores by all of its time."""
    finding = first(cpu_run({"data_loading": 40, "training_step": 75}, load_cpu_ms=40, cpu_ms=183, host=a_host(2)))
    assert finding.evidence["advised_num_workers"] == 2
    assert finding.ceiling == pytest.approx(115 / (75 + 33 / 2 + 1))


@pytest.mark.parametrize(("cpu_s", "kind"), [(0.150, "cpu_bound"), (0.100, "too_few_workers")])
def test_workers_that_use_every_core_are_not_multiplied(cpu_s: float, kind: str) -> None:
    """Steps of 40 ms on 4 cores pay for 160 ms of CPU time: 10 for training, the rest for loading."""
    finding = first(cpu_run(WAITS, **workers(4), host=a_host(4), worker_cpu_s_per_batch=cpu_s))
    assert finding.evidence["kind"] == kind
    assert finding.advice.startswith("More workers will not help") == (kind == "cpu_bound")
    assert ("cache what is computed each time" in finding.advice) == (kind == "cpu_bound")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (a_host(4), "150 ms of CPU time and a step 10 ms, and this job has 4 cores"),
        (a_host(cores_in_reach=4.04), "64 cores, of which other jobs leave it 4"),
        (a_host(16, local_ranks=4), "16 cores for 4 ranks"),
    ],
)
def test_the_cores_that_limit_are_named(host: HostBudget, words: str) -> None:
    finding = first(cpu_run(WAITS, **workers(4), host=host, worker_cpu_s_per_batch=0.150))
    assert finding.evidence["kind"] == "cpu_bound"
    assert words in finding.advice


def test_workers_that_wait_for_storage_are_multiplied_beyond_the_cores() -> None:
    finding = first(cpu_run(WAITS, **workers(3), host=a_host(2), worker_cpu_s_per_batch=0.002))
    assert finding.evidence["kind"] == "too_few_workers"
    assert "num_workers=14 (now 3)" in finding.advice


def test_a_full_shared_memory_is_to_be_enlarged() -> None:
    run = cpu_run(WAITS, **workers(2), host=a_host(shm_free_bytes=2**26), batch_bytes=2**24)
    assert "--shm-size" in first(run).advice
    assert "now 2" in first(run).advice


def test_a_loader_of_another_kind_gets_no_settings() -> None:
    finding = first(cpu_run(WAITS, loader=None))
    assert "kind" not in finding.evidence
    assert "num_workers" not in finding.advice


SLOW_WORKER = LoadingFacts(long_waits=30, ready_out_of_order_share=0.8)
ON_STORAGE = LoadingFacts(samples=50, storage_wait_share=0.6)


@pytest.mark.parametrize(
    ("loading", "cpu_s", "kind", "words"),
    [
        (ON_STORAGE, 0.02, "io_bound", "local disk"),
        (ON_STORAGE, 0.15, "too_few_workers", "pin_memory=True"),  # computing for most of the time
        (LoadingFacts(samples=50, storage_wait_share=0.1), 0.02, "too_few_workers", "num_workers="),
        (SLOW_WORKER, None, "slow_worker", "prefetch_factor=4 (now 2)"),
        (dataclasses.replace(SLOW_WORKER, long_waits=3), None, "too_few_workers", "num_workers="),
        (dataclasses.replace(SLOW_WORKER, ready_out_of_order_share=0.2), None, "too_few_workers", "num_workers="),
        (LoadingFacts(samples=50, runnable_share=0.9, delayed_share=0.3), None, "cpu_bound", "cache"),
        (LoadingFacts(samples=50, runnable_share=0.9, delayed_share=0.1), None, "too_few_workers", "num_workers="),
    ],
)
def test_what_the_workers_do_tells_the_kind(loading: LoadingFacts, cpu_s: float | None, kind: str, words: str) -> None:
    finding = first(gpu_run(WAITS, 25.0, loading=loading, worker_cpu_s_per_batch=cpu_s))
    assert finding.evidence["kind"] == kind
    assert words in finding.advice


def test_a_process_busy_with_unpacking_needs_no_more_workers() -> None:
    finding = first(gpu_run(WAITS, 25.0, load_cpu_ms=24))
    assert finding.evidence["kind"] == "main_process"
    assert "More workers will not help" in finding.advice


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"load_cpu_ms": 3.2}, "healthy"),  # the time it takes to receive a batch
        ({"loading": LoadingFacts(ready_share=1.0)}, "healthy"),
        ({"loading": LoadingFacts(ready_share=0.5)}, "low"),
        ({}, "low"),
    ],
)
def test_a_short_wait_for_what_lies_ready_is_no_finding(change: dict[str, Any], verdict: str) -> None:
    assert diagnose(cpu_run({"data_loading": 4, "training_step": 10}, **workers(4), **change)).verdict == verdict


def test_a_cold_page_cache_passes_by_itself() -> None:
    cold = LoadingFacts(early_storage_bytes_per_batch=8e6, late_storage_bytes_per_batch=1e5)
    run = gpu_run({"data_loading": 30, "training_step": 10}, 25.0, loading=cold)
    warm = [dataclasses.replace(one, data_loading_s=0.05, wall_s=0.15) for one in run.blocks[:9]]
    finding = first(dataclasses.replace(run, blocks=[*run.blocks[:11], *warm]))
    assert finding.evidence["kind"] == "cold_cache"
    assert first(run).evidence["kind"] == "too_few_workers"  # it stays slow


# --- the host ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy", "ms", "named"), [(None, 30, True), (None, 10, False), (20.0, 30, True), (90.0, 30, False)]
)
def test_validation_counts_beyond_a_quarter_with_an_idle_gpu(busy: float | None, ms: float, named: bool) -> None:
    run = gpu_run({"training_step": 60, "validation": ms}, 99.0, validation_utilization_percent=busy)
    cpu = dataclasses.replace(run, on_gpu=False, utilization_percent=None)
    causes = [finding.cause for finding in diagnose(cpu).findings]
    assert causes == (["validation"] if named else [])


@pytest.mark.parametrize(
    ("log_every_n_steps", "advised"),
    [(1, 200), (10, 2000), (50, 9850)],  # 20 ms every 200 steps are 2 % of 5.1 ms a step
)
def test_less_often_comes_with_how_often(log_every_n_steps: int, advised: int) -> None:
    run = dataclasses.replace(
        gpu_run({"logging/WandbLogger": 20, "training_step": 5}, log_every_n_steps=log_every_n_steps),
        on_gpu=False,
        utilization_percent=None,
    )
    assert f"log_every_n_steps={advised})" in first(run).advice


@pytest.mark.parametrize(("workers", "persistent", "advised"), [(0, False, False), (2, True, False), (2, False, True)])
def test_persistent_workers_are_advised_only_where_workers_end(workers: int, persistent: bool, advised: bool) -> None:
    loader = dataclasses.replace(LOADER, num_workers=workers, persistent_workers=persistent)
    finding = first(gpu_run({"epoch_start": 20, "training_step": 5}, utilization_percent=20.0, loader=loader))
    assert finding.cause == "epoch_start"
    assert ("persistent_workers=True" in finding.advice) is advised


def test_slow_transfer_hooks_are_found_without_a_gpu() -> None:
    run = gpu_run({"host_to_device_copy": 20, "training_step": 30})
    assert first(dataclasses.replace(run, on_gpu=False, utilization_percent=None)).cause == "host_to_device_copy"
