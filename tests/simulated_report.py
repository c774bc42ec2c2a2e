"""Reports as trainings of any size and length leave them, with synthetic measurements."""

import functools
import math
import random
from dataclasses import replace
from itertools import accumulate

from sample_report import FINDING, GIB, REPORT

from lightning_gpu_tools.advice.memory_account import PARTS, MemoryAccount, OtherProcess
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.training.memory_readings import MemoryLine, MemoryPoint
from lightning_gpu_tools.training.run_measurements import RankStep
from lightning_gpu_tools.training.stopwatch import PhaseTimeline
from lightning_gpu_tools.training.timeline import Series, Timeline

DAY_S = 86_400.0
# The parts of an epoch in their order, their shares of it, and how busy a GPU is in each, in percent.
_EPOCH = (("epoch_start", 0.02, 5.0), ("training", 0.80, 93.0), ("validation", 0.15, 60.0), ("checkpoint", 0.03, 0.0))
_MEAN_BUSY = sum(length * busy for _, length, busy in _EPOCH)
_STEP = {
    "data_loading": 0.08,
    "host_to_device_copy": 0.02,
    "training_step/forward": 0.25,
    "training_step/backward": 0.5,
    "training_step/optimizer": 0.1,
    "callback/EarlyStopping": 0.02,
    "trainer": 0.02,
    "unexplained": 0.01,
}


@functools.cache
def simulated_report(*, nodes: int = 1, gpus: int = 8, seconds: float = DAY_S, epochs: int = 10) -> Report:
    """Return the report of a training on so many GPUs a node. On the last node, the second GPU is slow."""
    chance = random.Random(0)
    phases, phase_s = PhaseTimeline(), dict[str, float]()
    phases.start(0.0)
    cuts = 4000
    for cut in range(1, cuts + 1):
        now_s = cut * seconds / cuts
        activity, _ = _at(now_s - seconds / cuts / 2, seconds / epochs)
        for phase, share in _STEP.items() if activity == "training" else [(activity, 1.0)]:
            phase_s[phase] = phase_s.get(phase, 0.0) + share * seconds / cuts
        if now_s >= phases.due_s:
            phases.cut(now_s, phase_s, cut)

    def timeline(metric: str, place: int, points: int) -> Series:
        slow = place == (nodes - 1) * gpus + 1
        sums = Timeline(points, min(1.0, seconds / 20), origin_s=0.0)
        for number in range(2 * points):
            time_s = (number + 0.5) * seconds / (2 * points)
            # Several epochs in one interval are all alike.
            activity, busy = _at(time_s, seconds / epochs) if points > epochs else ("training", _MEAN_BUSY)
            busy = busy * (0.45 if slow else 1.0) * (0.85 + 0.15 * math.sin(place + time_s / seconds * 9))
            busy = min(100.0, max(0.0, busy + chance.gauss(0, 4)))
            used = GIB * (40 + 2 * (place % 7) + (12 if activity == "validation" else 0) + 10 * time_s / seconds)
            value = {"utilization_percent": busy, "memory_used_bytes": used, "power_watts": 120 + 5.4 * busy}[metric]
            sums.add(time_s, round(value, 1))
        return sums.series()

    def gpu(place: int) -> GpuSummary:
        points = 2000 if place < gpus else 128  # of another node
        metrics = ("utilization_percent", "memory_used_bytes", "power_watts")
        series = {name: timeline(name, place, points) for name in metrics}
        busy = [value for _, value in series["utilization_percent"].points()]
        mean = sum(busy) / len(busy)
        return GpuSummary(
            index=place % gpus,
            node=place // gpus,
            uuid=f"GPU-{place:08x}-1111-2222-3333-444444444444",
            name="NVIDIA H100 80GB HBM3",
            utilization_percent_mean=mean,
            utilization_percent_p5=min(busy),
            utilization_percent_p95=max(busy),
            validation_utilization_percent_mean=mean / 1.51,
            memory_used_bytes_max=round(64.3 * GIB) + place,
            memory_total_bytes=80 * GIB,
            power_watts_mean=120 + 5.4 * mean,
            energy_joules=(120 + 5.4 * mean) * seconds,
            temperature_celsius_max=61.0 + place % 9,
            throttled_percent=chance.random(),
            own_memory_bytes=64 * GIB,
            others_memory_bytes_max=0,
            own_utilization_percent=mean,
            others_utilization_percent=0.0,
            sm_active_percent=mean / 1.31,
            sm_occupancy_percent=mean / 2.17,
            tensor_active_percent=mean / 3.33,
            dram_active_percent=mean / 2.9,
            timelines=series if place < gpus else {},
        )

    def account(place: int) -> MemoryAccount:
        parts = {name: round(80 * GIB / (len(PARTS) + 1)) + place for name in PARTS}
        points = [MemoryPoint(i * seconds / 200, 2e10, 4e10 + 1e8 * i, 6e10 + 1e8 * (i // 50)) for i in range(200)]
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
            moments_bytes=dict.fromkeys(("before_training", "step_start", "after_forward", "after_step"), 20 * GIB),
            peaks_bytes=dict.fromkeys(("forward", "backward", "optimizer"), 41 * GIB),
            timeline=tuple(points) if place == 0 else (),
            peak_lines=tuple(
                MemoryLine(4 * GIB // i, 12, "forward", "src/models/decoder.py", 100 + i, "forward")
                for i in range(1, 11)
            ),
            kept_lines=(MemoryLine(2**20, 4, "", "src/train.py", 57, "training_step"),),
        )

    def rank(number: int) -> RankStep:
        step = {phase: share * 0.2 * (0.9 + 0.2 * chance.random()) for phase, share in _STEP.items()}
        return RankStep(
            rank=number,
            node=number // gpus,
            own_step_s=sum(step.values()),
            phase_s=step,
            own_s_over_time=tuple(round(sum(step.values()) * (0.9 + 0.2 * chance.random()), 6) for _ in range(16)),
            steps_over_time=1280,
            wait_s=0.01,
            gpu=number % gpus,
        )

    every = range(nodes * gpus)
    return replace(
        REPORT,
        outcome="completed",
        steps=round(seconds / 0.2),
        wall_s=seconds,
        phase_s=phase_s,
        step_s_median=0.2,
        step_s_blocks=tuple(0.2 + 0.01 * chance.random() for _ in range(128)),
        spans=tuple(phases.spans()),
        gpus=tuple(map(gpu, every)),
        memory=tuple(map(account, every)),
        ranks=tuple(map(rank, every)) if len(every) > 1 else (),
        diagnosis=replace(REPORT.diagnosis, findings=(FINDING,)),
        settings={**REPORT.settings, "world_size": len(every)},
    )


def _at(time_s: float, epoch_s: float) -> tuple[str, float]:
    """Return the activity of a training at a moment, and how busy it keeps a GPU, in percent."""
    share = time_s / epoch_s % 1
    until = accumulate(length for _, length, _ in _EPOCH)
    return next((activity, busy) for (activity, _, busy), end in zip(_EPOCH, until, strict=True) if share <= end + 1e-9)
