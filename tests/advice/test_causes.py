"""Every cause of the diagnosis, on measurements that have it and on similar ones that do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_runs import GIB, LOADER, gpu_run, looks

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Diagnosis, Finding
from lightning_gpu_tools.advice.inside_step import batch_size_that_fits, wants_profile
from lightning_gpu_tools.training.run_measurements import (
    GpuFacts,
    LoadingFacts,
    ProfiledSteps,
    RankStep,
    RunMeasurements,
    settled,
)


def judge(run: RunMeasurements) -> Diagnosis:
    return diagnose(run, min_seconds=0)


def first(run: RunMeasurements) -> Finding:
    return judge(run).findings[0]


# --- the GPU's own times -----------------------------------------------------------------------------------------


def test_a_wait_behind_gpu_work_is_no_cause() -> None:
    """The GPU is idle 40 % of the time, but not while the host waits for data: that is hidden behind its work."""
    run = gpu_run({"data_loading": 40, "training_step": 60}, 60.0, gpu_idle=looks(data_loading=(40.0, 0.5)))
    assert [finding.cause for finding in judge(run).findings] == ["unexplained"]
    without = dataclasses.replace(run, gpu_idle=None)
    assert [finding.cause for finding in judge(without).findings] == ["data_loading"]


def test_a_wait_counts_only_while_the_gpu_is_idle() -> None:
    run = gpu_run({"data_loading": 60, "training_step": 40}, 50.0, gpu_idle=looks(data_loading=(60.0, 30.0)))
    finding = first(run)
    assert finding.cause == "data_loading"
    assert finding.share == pytest.approx(0.30)
    assert finding.evidence["exposed_percent"] == pytest.approx(50.0)
    assert judge(run).gpu_idle_percent == pytest.approx({"data_loading": 30.0, "training_step": 20.0})


def test_an_event_too_rare_to_be_sampled_counts_in_full() -> None:
    run = gpu_run({"checkpoint": 30, "training_step": 70}, 60.0, gpu_idle=looks(training_step=(0.0, 0.0)))
    assert first(run).cause == "checkpoint"
    assert first(run).share == pytest.approx(0.3)


def test_times_that_contradict_the_driver_lower_the_confidence() -> None:
    """By its own times the GPU is idle for 60 % of the time, by the driver for 35 %."""
    run = gpu_run({"data_loading": 60, "training_step": 40}, 65.0, gpu_idle=looks(data_loading=(60.0, 60.0)))
    diagnosis = judge(run)
    assert diagnosis.gpu_idle_residual_percent == pytest.approx(25.0)
    finding = diagnosis.findings[0]
    assert finding.share == pytest.approx(0.35)
    assert finding.ceiling_lower == pytest.approx(1 / (1 - 0.10))


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
    diagnosis = judge(run)
    (finding,) = diagnosis.findings
    assert finding.cause == "launch_bound"
    assert finding.basis == "heuristic"
    assert "too small for this GPU" in diagnosis.next_step
    slow_loader = gpu_run({"training_step": 1.0, "data_loading": 3.0}, 12.0)
    assert [one.cause for one in judge(slow_loader).findings] == ["data_loading"]


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
    assert judge(run).verdict == "low"
    assert finding.cause == "small_batch"
    assert finding.share == pytest.approx(0.70)
    assert "batch_size=256 (now 32" in finding.advice
    full = dataclasses.replace(BUSY, step_memory_bytes=60 * GIB)
    assert judge(gpu_run({"training_step": 50}, 95.0, gpu=full)).findings[0].cause == "unexplained"


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
    diagnosis = judge(gpu_run({"training_step": 50}, 97.0, gpu=gpu))
    assert diagnosis.verdict == "healthy"
    assert [finding.cause for finding in diagnosis.findings] == (["low_precision"] if words else [])
    assert (words or "No change needed") in diagnosis.next_step


@pytest.mark.parametrize(
    "change", [{"precision": "bf16-mixed"}, {"gpu": dataclasses.replace(BUSY, sm_active_percent=90.0)}]
)
def test_tensor_cores_in_use_are_no_remark(change: dict[str, Any]) -> None:
    gpu = GpuFacts(compute_capability=(9, 0), sm_active_percent=90.0, tensor_active_percent=0.0)
    run = gpu_run({"training_step": 50}, 97.0, **{"gpu": gpu, **change})
    assert judge(run).findings == ()


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
    diagnosis = judge(gpu_run({"training_step": 50}, 100.0, gpu=hot))
    (finding,) = diagnosis.findings
    assert (diagnosis.verdict, finding.cause, finding.basis) == ("healthy", "thermal_throttling", "measured")
    assert finding.ceiling == pytest.approx(1 / (1 - 0.6 * 0.3))
    assert judge(gpu_run({"training_step": 50}, 100.0, gpu=GpuFacts(thermal_throttled_percent=4.0))).findings == ()


@pytest.mark.parametrize(
    ("capped", "clock", "utilization", "named"),
    [(80.0, 70.0, 99.0, True), (80.0, 95.0, 99.0, False), (40.0, 70.0, 99.0, False), (80.0, None, 99.0, False)],
)
def test_the_power_limit_matters_only_if_it_costs_much_clock(
    capped: float, clock: float | None, utilization: float, named: bool
) -> None:
    gpu = GpuFacts(power_capped_percent=capped, held_clock_percent=clock)
    causes = [finding.cause for finding in judge(gpu_run({"training_step": 50}, utilization, gpu=gpu)).findings]
    assert causes == (["power_cap"] if named else [])


@pytest.mark.parametrize(
    ("percent", "size", "shared"),
    [(40.0, 3 * GIB, True), (1.0, 3 * GIB, False), (None, 3 * GIB, True), (None, 2**20, False)],
)
def test_with_others_on_the_gpu_nothing_is_tuned(percent: float | None, size: int, shared: bool) -> None:
    gpu = GpuFacts(others_utilization_percent=percent, others_memory_bytes=size)
    diagnosis = judge(gpu_run({"data_loading": 50, "training_step": 50}, 30.0, gpu=gpu))
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
    diagnosis = judge(run)
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
    assert judge(gpu_run({"training_step": 50}, 99.0, ranks=ranks(*alike))).findings == ()


# --- loading -----------------------------------------------------------------------------------------------------


def kind(loading: LoadingFacts | None, **options: Any) -> Finding:
    return first(gpu_run({"data_loading": 30, "training_step": 10}, 25.0, loading=loading, **options))


def test_workers_that_wait_for_storage_are_io_bound() -> None:
    finding = kind(LoadingFacts(samples=50, storage_wait_share=0.6), worker_cpu_s_per_batch=0.02)
    assert finding.evidence["kind"] == "io_bound"
    assert "60 %" in finding.advice
    assert "local disk" in finding.advice
    computing = kind(LoadingFacts(samples=50, storage_wait_share=0.6), worker_cpu_s_per_batch=0.15)
    assert computing.evidence["kind"] != "io_bound"
    assert kind(LoadingFacts(samples=50, storage_wait_share=0.1)).evidence["kind"] == "too_few_workers"


def test_one_slow_worker_needs_no_more_workers() -> None:
    finding = kind(LoadingFacts(long_waits=30, ready_out_of_order_share=0.8))
    assert finding.evidence["kind"] == "slow_worker"
    assert "prefetch_factor=4 (now 2)" in finding.advice
    assert "num_workers=" not in finding.advice
    assert kind(LoadingFacts(long_waits=3, ready_out_of_order_share=0.8)).evidence["kind"] == "too_few_workers"
    assert kind(LoadingFacts(long_waits=30, ready_out_of_order_share=0.2)).evidence["kind"] == "too_few_workers"


def test_a_process_busy_with_unpacking_needs_no_more_workers() -> None:
    run = gpu_run({"data_loading": 30, "training_step": 10}, 25.0)
    busy = [dataclasses.replace(one, data_loading_cpu_s=0.8 * one.data_loading_s) for one in run.blocks]
    finding = first(dataclasses.replace(run, blocks=busy))
    assert finding.evidence["kind"] == "main_process"
    assert "More workers will not help" in finding.advice


def test_the_time_to_receive_a_batch_is_no_finding() -> None:
    run = gpu_run({"data_loading": 4, "training_step": 10}, None)
    busy = [dataclasses.replace(one, data_loading_cpu_s=0.8 * one.data_loading_s) for one in run.blocks]
    assert judge(dataclasses.replace(run, blocks=busy, on_gpu=False)).verdict == "healthy"
    assert judge(dataclasses.replace(run, on_gpu=False)).verdict == "low"


@pytest.mark.parametrize(("delayed", "is_bound"), [(0.4, True), (0.1, False)])
def test_workers_that_find_no_free_core_are_cpu_bound(delayed: float, is_bound: bool) -> None:
    finding = kind(LoadingFacts(runnable_share=0.95, delayed_share=delayed), worker_cpu_s_per_batch=0.08)
    assert (finding.evidence["kind"] == "cpu_bound") is is_bound


def test_a_short_wait_for_ready_batches_is_no_finding() -> None:
    run = gpu_run({"data_loading": 4, "training_step": 10}, None, on_gpu=False)
    assert judge(dataclasses.replace(run, loading=LoadingFacts(ready_share=1.0))).verdict == "healthy"
    assert judge(dataclasses.replace(run, loading=LoadingFacts(ready_share=0.5))).verdict == "low"


def test_a_cold_page_cache_passes_by_itself() -> None:
    cold = LoadingFacts(early_storage_bytes_per_batch=8e6, late_storage_bytes_per_batch=1e5)
    run = gpu_run({"data_loading": 30, "training_step": 10}, 25.0, loading=cold)
    warm = [dataclasses.replace(one, data_loading_s=0.05, wall_s=0.15) for one in run.blocks[:9]]
    finding = first(dataclasses.replace(run, blocks=[*run.blocks[:11], *warm]))
    assert finding.evidence["kind"] == "cold_cache"
    assert first(run).evidence["kind"] == "too_few_workers"  # it stays slow


def test_the_settings_come_with_the_tool_that_finds_them() -> None:
    assert "NumWorkersFinder()" in kind(None).advice
    assert "pin_memory=True" in kind(None).advice


# --- the host ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy", "ms", "named"), [(None, 30, True), (None, 10, False), (20.0, 30, True), (90.0, 30, False)]
)
def test_validation_counts_beyond_a_quarter_with_an_idle_gpu(busy: float | None, ms: float, named: bool) -> None:
    run = gpu_run({"training_step": 60, "validation": ms}, 99.0, validation_utilization_percent=busy)
    cpu = dataclasses.replace(run, on_gpu=False, utilization_percent=None)
    causes = [finding.cause for finding in judge(cpu).findings]
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


# --- warm-up -----------------------------------------------------------------------------------------------------


def test_blocks_that_are_still_getting_faster_are_warm_up() -> None:
    steady = gpu_run({"training_step": 50}).blocks[0]
    slow = dataclasses.replace(steady, wall_s=2 * steady.wall_s)
    assert settled([slow, slow, *[steady] * 18]) == [steady] * 18
    assert settled([steady] * 20) == [steady] * 20
    assert len(settled([slow] * 10 + [steady] * 10)) == 15  # never more than a quarter
    assert settled([slow, steady]) == [slow, steady]


@given(
    st.dictionaries(
        st.sampled_from(["data_loading", "training_step", "callback/A", "checkpoint", "validation", "trainer"]),
        st.floats(0.01, 1000),
        min_size=1,
    ),
    st.one_of(st.none(), st.floats(0, 100)),
    st.dictionaries(
        st.sampled_from(["data_loading", "callback/A", "trainer"]),
        st.tuples(st.floats(0, 100), st.floats(0, 100)),
    ),
)
def test_any_measurement_gives_possible_numbers(
    phase_ms: dict[str, float], utilization: float | None, idle: dict[str, tuple[float, float]]
) -> None:
    diagnosis = judge(gpu_run(phase_ms, utilization, gpu_idle=looks(**idle)))
    assert len(diagnosis.findings) <= 4
    ceilings = [finding.ceiling for finding in diagnosis.findings]
    assert ceilings == sorted(ceilings, reverse=True)
    for finding in diagnosis.findings:
        assert 0 <= finding.share <= 1
        assert finding.ceiling_lower <= finding.ceiling
        assert finding.advice
