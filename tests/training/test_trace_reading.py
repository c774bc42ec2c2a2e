"""What a trace says, on traces of a few events and on a real one of the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_gpu_tools.training.step_profiler import STEP, read_trace, union


def event(category: str, name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}


def step(begin: float, end: float) -> dict[str, Any]:
    return event("user_annotation", STEP, begin, end)


def kernel(begin: float, end: float, name: str = "gemm") -> dict[str, Any]:
    return event("kernel", name, begin, end)


def idle_us(*events: dict[str, Any]) -> dict[str, float]:
    facts = read_trace(events)
    assert facts is not None
    return {reason: round(1e6 * seconds, 3) for reason, seconds in facts.idle_s.items() if seconds}


def test_without_steps_or_without_a_gpu_little_is_said() -> None:
    assert read_trace([kernel(0, 10)]) is None
    facts = read_trace([step(0, 100), event("cpu_op", "aten::_local_scalar_dense", 10, 11)])
    assert facts is not None
    assert (facts.kernels_per_step, facts.kernel_median_us, dict(facts.idle_s)) == (0, None, {})
    assert facts.syncs_per_step == 1


def test_a_gap_after_a_wait_is_due_to_the_wait() -> None:
    wait = event("cuda_runtime", "cudaStreamSynchronize", 20, 52)
    assert idle_us(step(0, 100), kernel(0, 50), wait, kernel(80, 100)) == {"sync": 30}


def test_a_gap_before_a_late_launch_is_due_to_launching() -> None:
    launches = [event("cuda_runtime", "cudaLaunchKernel", at, at + 5) for at in (0, 40, 75)]
    assert idle_us(step(0, 100), *launches, kernel(0, 30), kernel(45, 60), kernel(80, 100)) == {"launch": 35}


def test_copies_between_kernels_are_named_and_pageable_ones_counted() -> None:
    copy = event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 30, 55)
    events = [step(0, 100), kernel(0, 30), copy, kernel(60, 100)]
    assert idle_us(*events) == {"copy": 25, "launch": 5}
    facts = read_trace(events)
    assert facts is not None
    assert facts.pageable_copies_per_step == 1


def test_what_happens_between_steps_is_not_inside_of_them() -> None:
    assert idle_us(step(0, 50), step(200, 250), kernel(0, 50), kernel(210, 250)) == {"launch": 10}


def test_communication_counts_where_nothing_else_runs() -> None:
    facts = read_trace([step(0, 100), kernel(0, 60), kernel(40, 100, "ncclDevKernel_AllReduce_Sum")])
    assert facts is not None
    assert facts.exposed_communication_s == pytest.approx(40e-6)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)).map(lambda one: (one[0], one[0] + one[1])), max_size=30))
def test_the_parts_of_the_idle_time_add_up(spans: list[tuple[float, float]]) -> None:
    kernels = [kernel(begin, end) for begin, end in spans if end > begin]
    facts = read_trace([step(0, 130), *kernels])
    assert facts is not None
    if kernels:
        busy = sum(end - begin for begin, end in union((one["ts"], one["ts"] + one["dur"]) for one in kernels))
        assert 1e6 * sum(facts.idle_s.values()) == pytest.approx(130 - busy, abs=1e-6)


def test_a_real_trace_of_torch_is_understood(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 4)
    with profile(activities=[ProfilerActivity.CPU]) as running:
        for _ in range(3):
            with record_function(STEP):
                layer(torch.ones(2, 4)).sum().item()
                layer(torch.ones(2, 4)).sum().item()
    running.export_chrome_trace(str(tmp_path / "trace.json"))
    facts = read_trace(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert facts is not None
    assert (facts.steps, facts.syncs_per_step, facts.kernels_per_step) == (3, 2, 0)
    assert facts.wall_s > 0
