"""Tables of what ran on a real GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lightning_gpu_tools.units import format_bytes

from .markdown import RESULTS, Results, block, results, source, table

PARTS = ("forward", "backward", "optimizer")


def _measured(command: str, name: str) -> str:
    """Return how figures of a real GPU came about."""
    machine = results(name)["machine"]
    return (
        f"`python benchmarks/{command}` on one {machine['gpus'][0]}, {machine['cores']} cores, torch "
        f"{machine['torch']}, {machine['date']}: [{name}.json]({RESULTS}/{name}.json)."
    )


def h200_gpu_times() -> str:
    """Return the GPU times of the report next to those of torch.profiler."""
    found = results("h200/gpu_times")

    def pair(one: Results, part: str) -> str:
        return f"{one['report_ms'][part]:.1f} / {one['profiler_ms'][part]:.1f}"

    rows = [
        (one["training"], *(pair(one, part) for part in PARTS), f"{one['elapsed_forward_ms']:.1f}")
        for one in found["trainings"]
    ]
    head = ("training, bf16-mixed", *(f"{part}: report / profiler, ms" for part in PARTS), "elapsed in forward, ms")
    return block(table(head, *rows), _measured("gpu_times.py", "h200/gpu_times"))


def h200_advice() -> str:
    """Return how ResNet-50 got faster by what its reports said."""
    found = results("h200/following_advice")

    def settings(one: dict[str, Any]) -> str:
        given = {**one["loader"], **one["trainer"]}
        return ", ".join(f"`{name}={value}`" for name, value in given.items()) or "defaults"

    rows = [
        (
            settings(one),
            f"{one['samples_per_s']:,.0f}",
            f"{one['utilization_percent']:.0f} %",
            one["why"].partition("time. ")[2],
        )
        for one in found["trainings"]
    ]
    return block(
        table(("DataLoader", "images/s", "GPU busy", "the report says"), *rows),
        _measured("following_advice.py", "h200/following_advice"),
    )


def h200_diagnosis() -> str:
    """Return what was said of trainings with a known cause."""
    found = results("h200/diagnosis")

    def said(one: Results) -> str:
        return {"too_short": "too short to judge"}.get(one["said"], one["said"])

    def ms(one: Results) -> str:
        known = one["forward_ms_known"]
        return f"{one['forward_ms']:.1f} of {known:.1f}" if known else ""

    rows = [
        (one["training"], " or ".join(one["known"]), said(one), one["line_known"] and "named", ms(one))
        for one in found["answers"]
    ]
    return block(
        table(("training, 3.5 s", "known", "said first", "line", "GPU time of forward, ms"), *rows),
        _measured("diagnosis_on_gpu.py --seconds 3.5", "h200/diagnosis"),
    )


def h200_peaks() -> str:
    """Return the peaks of an H200, and how far those of a dry run are from them."""
    found = results("h200/dry_run_peaks")
    keys = ("allocated", "reserved", "in use")
    rows = [
        (
            f"{one['model']}, {one['batch']} x {one['size']}",
            *(format_bytes(one["real"][key]) for key in keys),
            *(f"{100 * one['error'][key]:+.1f} %".replace("-0.0", "0").replace("+0.0", "0") for key in keys),
        )
        for one in found["runs"]
    ]
    head = ("training", *(f"{key} on a real H200" for key in keys), *(f"{key}, dry run" for key in keys))
    return block(
        table(head, *rows),
        f"The peaks: {_measured('dry_run_peaks.py', 'h200/peaks')} The dry run: "
        f"{source('dry_run_peaks.py --against h200/peaks.json', 'h200/dry_run_peaks')}",
    )


def h100_tests() -> str:
    """Return how many tests passed."""
    counted = Counter(outcome.partition(":")[0] for outcome in results("h100/tests")["outcomes"].values())
    failed = f"{counted['failed']} failed" if counted["failed"] else "none failed"
    return block(
        f"**{counted['passed']} tests passed, {failed}**; {counted['skipped']} need more GPUs, a simulated one, or "
        f"IPython: [h100/tests.json]({RESULTS}/h100/tests.json)."
    )
