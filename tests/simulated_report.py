"""Reports as trainings of any size and length leave them, with synthetic measurements."""

import functools
import math
from dataclasses import replace

from sample_report import FINDING, GIB, REPORT

from lightning_gpu_tools.advice.memory_account import PARTS, MemoryAccount, OtherProcess
from lightning_gpu_tools.gpus.metrics import GpuSummary, Series
from lightning_gpu_tools.memory.readings import MemoryLine
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.training.run_measurements import PhaseSpan, RankStep

DAY_S = 86_400.0
_SPANS, _POINTS = 400, 2000
_STEP = {
    "data_loading": 0.08,
    "training_step/forward": 0.25,
    "training_step/backward": 0.5,
    "training_step/optimizer": 0.1,
    "callback/EarlyStopping": 0.06,
    "unexplained": 0.01,
}


@functools.cache
def simulated_report(*, nodes: int = 1, gpus: int = 8, seconds: float = DAY_S) -> Report:
    """Return the report of a training on so many GPUs a node. On the last node, the second GPU is slow."""
    spans = []
    phase_s = dict.fromkeys((*_STEP, "validation"), 0.0)
    for number in range(_SPANS):
        is_validation = number % 40 >= 32  # the last fifth of each of ten epochs
        shares = {"validation": 1.0} if is_validation else _STEP
        grouped: dict[str, float] = {}
        for phase, share in shares.items():
            phase_s[phase] += share * seconds / _SPANS
            group = phase.partition("/")[0]
            grouped[group] = grouped.get(group, 0.0) + share * seconds / _SPANS
        spans.append(PhaseSpan(number * seconds / _SPANS, (number + 1) * seconds / _SPANS, grouped, 100))

    def series(place: int, mean: float, swing: float) -> Series:
        values = [
            round(mean + swing * math.sin(place + number / 9) * math.cos(number * 7), 1) for number in range(_POINTS)
        ]
        return Series(0.0, seconds / _POINTS, values)

    def gpu(place: int) -> GpuSummary:
        busy = 33.0 if place == (nodes - 1) * gpus + 1 else 70.0 + place % 7
        timelines = {
            "utilization_percent": series(place, busy, 10.0),
            "memory_used_bytes": series(place, (50 + place % 7) * GIB, 4 * GIB),
            "power_watts": series(place, 120 + 5.4 * busy, 50.0),
        }
        return GpuSummary(
            index=place % gpus,
            node=place // gpus,
            uuid=f"GPU-{place:08x}-1111-2222-3333-444444444444",
            name="NVIDIA H100 80GB HBM3",
            utilization_percent_mean=busy,
            memory_used_bytes_max=round(64.3 * GIB) + place,
            memory_total_bytes=80 * GIB,
            power_watts_mean=120 + 5.4 * busy,
            temperature_celsius_max=61.0 + place % 9,
            throttled_percent=0.5,
            sm_active_percent=busy / 1.31,
            tensor_active_percent=busy / 3.33,
            timelines=timelines if place < gpus else {},
        )

    def account(place: int) -> MemoryAccount:
        parts = {name: round(80 * GIB / (len(PARTS) + 1)) + place for name in PARTS}
        return MemoryAccount(
            index=place % gpus,
            node=place // gpus,
            uuid=f"GPU-{place:08x}-1111-2222-3333-444444444444",
            total_bytes=80 * GIB,
            used_bytes=sum(parts.values()),
            free_bytes=80 * GIB - sum(parts.values()),
            parts_bytes=parts,
            explained_share=0.93,
            others=(OtherProcess(pid=4711, used_bytes=parts["other_processes"], user="ada", name="python"),),
            peak_lines=(MemoryLine(4 * GIB, 12, "forward", "src/models/decoder.py", 101, "forward"),) * 10,
        )

    def rank(number: int) -> RankStep:
        step = {phase: share * 0.2 for phase, share in _STEP.items()}
        own_s = 0.2 + 0.01 * (number % 5)
        return RankStep(
            rank=number, node=number // gpus, own_step_s=own_s, phase_s=step, wait_s=0.01, gpu=number % gpus
        )

    every = range(nodes * gpus)
    return replace(
        REPORT,
        outcome="completed",
        steps=round(seconds / 0.2),
        wall_s=seconds,
        phase_s=phase_s,
        step_s_blocks=(0.2, 0.21) * 64,
        spans=tuple(spans),
        gpus=tuple(map(gpu, every)),
        memory=tuple(map(account, every)),
        ranks=tuple(map(rank, every)) if len(every) > 1 else (),
        diagnosis=replace(REPORT.diagnosis, findings=(FINDING,)),
        settings={**REPORT.settings, "world_size": len(every)},
    )
