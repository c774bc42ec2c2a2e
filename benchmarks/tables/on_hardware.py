"""Tables of runs on a real GPU."""

from collections import Counter
from typing import Any

from lightning_gpu_tools.units import format_bytes

from .gpus import line
from .markdown import RESULTS, Results, block, results, signed_percent, source, table

PARTS = ("forward", "backward", "optimizer")


def _measured(command: str, name: str) -> str:
    """Return the command, GPU, and date of figures, with a link to the raw results."""
    machine = results(name)["machine"]
    return (
        f"`python benchmarks/{command}` on one {machine['gpus'][0]}, {machine['cores']} cores, torch "
        f"{machine['torch']}, {machine['date']}: [{name}.json]({RESULTS}/{name}.json)."
    )


def h200_gpu_times() -> str:
    """Return the report's GPU times and torch.profiler's."""
    found = results("h200/gpu_times")

    def pair(one: Results, part: str) -> str:
        return f"{one['report_ms'][part]:.1f} / {one['profiler_ms'][part]:.1f}"

    rows = [
        (one["training"], *(pair(one, part) for part in PARTS), f"{one['elapsed_forward_ms']:.1f}")
        for one in found["trainings"]
    ]
    head = ("run, bf16-mixed", *(f"{part}: report / profiler, ms" for part in PARTS), "elapsed in forward, ms")
    return block(table(head, *rows), _measured("gpu_times.py", "h200/gpu_times"))


def h200_advice() -> str:
    """Return the speed of ResNet-50 after each piece of advice."""
    found = results("h200/following_advice")

    def settings(one: dict[str, Any]) -> str:
        given = {**one["loader"], **one["trainer"]}
        return ", ".join(f"`{name}={value}`" for name, value in given.items()) or "defaults"

    rows = [
        (
            settings(one),
            f"{one['samples_per_s']:,.0f}",
            f"{one['utilization_percent']:.0f}%",
            one["why"].partition("time. ")[2].replace(" %", "%"),
        )
        for one in found["trainings"]
    ]
    return block(
        table(("DataLoader", "images/s", "GPU busy", "the report says"), *rows),
        _measured("following_advice.py", "h200/following_advice"),
    )


def h100_diagnosis() -> str:
    """Return the diagnoses of runs with a known cause."""
    found = results("h100/diagnosis")

    def reported(one: Results) -> str:
        return {"too_short": "too short to judge"}.get(one["said"], one["said"])

    def ms(one: Results) -> str:
        known = one["forward_ms_known"]
        return f"{one['forward_ms']:.1f} of {known:.1f}" if known else ""

    rows = [(one["training"], " or ".join(one["known"]), reported(one), line(one), ms(one)) for one in found["answers"]]
    return block(
        table(("run, 10 s", "expected", "first finding", "line", "GPU time of forward, ms"), *rows),
        _measured("diagnosis_on_gpu.py --seconds 10", "h100/diagnosis"),
    )


def h100_largest_batch() -> str:
    """Return predicted and actual largest batch sizes."""
    rows = [
        (
            one["model"],
            *(f"{size} ({signed_percent(one['error'][small])})" for small, size in one["predicted"].items()),
            str(one["found"]),
        )
        for one in results("h100/largest_batch")["sizes"]
    ]
    return block(
        table(("model", "predicted from batches of 8", "predicted from batches of 32", "largest that trains"), *rows),
        _measured("largest_batch.py --model ...", "h100/largest_batch"),
    )


def h200_peaks() -> str:
    """Return the memory peaks of an H200, and the errors of a dry run."""
    found = results("h200/dry_run_peaks")
    keys = ("allocated", "reserved", "in use")
    rows = [
        (
            f"{one['model']}, {one['batch']} x {one['size']}",
            *(format_bytes(one["real"][key]) for key in keys),
            *(signed_percent(one["error"][key]) for key in keys),
        )
        for one in found["runs"]
    ]
    head = ("run", *(f"{key} on a real H200" for key in keys), *(f"{key}, dry run" for key in keys))
    return block(
        table(head, *rows),
        f"Peaks: {_measured('dry_run_peaks.py', 'h200/peaks')} Dry run: "
        f"{source('dry_run_peaks.py --against h200/peaks.json', 'h200/dry_run_peaks')}",
    )


def h100_tests() -> str:
    """Return the number of tests that passed."""
    counted = Counter(outcome.partition(":")[0] for outcome in results("h100/tests")["outcomes"].values())
    failed = f"{counted['failed']} failed" if counted["failed"] else "none failed"
    return block(
        f"**{counted['passed']} tests passed, {failed}**. {counted['skipped']} were skipped, because they need more "
        f"GPUs, a simulated GPU, or IPython: [h100/tests.json]({RESULTS}/h100/tests.json)."
    )
