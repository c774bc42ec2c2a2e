"""A report for the tests that need one."""

from dataclasses import replace
from typing import Any

from lightning_gpu_tools.advice.findings import Diagnosis, Finding
from lightning_gpu_tools.advice.memory_account import MemoryAccount, OtherProcess
from lightning_gpu_tools.gpus.metrics import GpuSummary, Series
from lightning_gpu_tools.reports.report import Report

GIB = 2**30

FINDING = Finding(
    cause="data_loading",
    share=0.61,
    ceiling=1 / 0.39,
    ceiling_lower=2.4,
    evidence={"phase": "data_loading", "kind": "too_few_workers", "wait_ms_per_step": 31.0, "step_ms": 51.0},
    advice="Set DataLoader(..., num_workers=6) (now 0).",
)
REPORT = Report(
    outcome="stopped by KeyError at step 812",
    started_at="2026-01-02T03:04:05+00:00",
    steps=812,
    wall_s=41.4,
    phase_s={"data_loading": 25.2, "training_step": 15.0, "callback/EarlyStopping": 1.0, "unexplained": 0.2},
    diagnosis=Diagnosis(
        verdict="low",
        findings=(FINDING,),
        why="Waiting for data takes 61% of the wall time (31 ms of 51 ms per steady step).",
        next_step="Set DataLoader(..., num_workers=6) (now 0). Speedup: about 2.3x (2.1x to 2.5x).",
        step_p50_s=0.050,
        step_p95_s=0.062,
    ),
    gpus=(
        GpuSummary(
            index=3,
            uuid="GPU-1",
            name="NVIDIA H200",
            utilization_percent_mean=34.2,
            memory_used_bytes_max=60 * GIB,
            memory_total_bytes=140 * GIB,
            timelines={"utilization_percent": Series(0.0, 1.0, [30.0, 38.0])},
        ),
    ),
    memory=(
        MemoryAccount(
            index=3,
            uuid="GPU-1",
            total_bytes=140 * GIB,
            used_bytes=60 * GIB,
            free_bytes=80 * GIB,
            parts_bytes={
                "parameters": 4 * GIB,
                "activations": 30 * GIB,
                "cache_reusable": 5 * GIB,
                "other_processes": 20 * GIB,
                "unexplained": GIB,
            },
            explained_share=59 / 60,
            others=(OtherProcess(pid=4711, used_bytes=20 * GIB, user="ada", name="python"),),
        ),
    ),
    step_s_max=0.51,
    samples_per_s=64 * 2 / 0.051,
    settings={
        "model": "LitModel",
        "batch_size": 64,
        "world_size": 2,
        "precision": "32-true",
        "torch": "2.15.0",
        "lightning": "2.6.6",
    },
)


def with_finding(report: Report = REPORT, **changed: Any) -> Report:
    """The report with one finding, which is that of the sample but for some fields."""
    return replace(report, diagnosis=replace(report.diagnosis, findings=(replace(FINDING, **changed),)))


# The same on a GPU alone: 39 GiB in the allocator and 1 of CUDA's own.
TRAINED = replace(
    REPORT,
    outcome="completed",
    memory=(
        replace(
            REPORT.memory[0],
            parts_bytes={"parameters": 4 * GIB, "activations": 35 * GIB, "context": GIB},
        ),
    ),
)
