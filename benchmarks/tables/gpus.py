"""Tables about GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_gpu_tools.units import format_bytes

from .markdown import Results, block, median_and_range, results, source, table


def pick_speed() -> str:
    found = results("pick_speed")
    bare_s = found["median_s"]["bare nvidia-ml-py"]
    repeats = len(found["all_s"]["bare nvidia-ml-py"])
    plain, imported = "python -c pass", "import lightning_gpu_tools"
    rows = [
        (name, median_and_range(found["all_s"][name]), f"{seconds / bare_s:.2f}")
        for name, seconds in found["median_s"].items()
        if name not in ("Python alone", plain, imported)
    ]
    of_import = ""
    if imported in found["median_s"]:
        ratio = found["median_s"][imported] / found["median_s"][plain]
        takes = median_and_range(found["all_s"][imported])
        of_import = f"Without GPUs, `{imported}` takes {takes}, {ratio:.2f} times `{plain}`. "
    return block(
        table(("a new process each", f"median of {repeats} (range)", "/ bare script"), *rows),
        f"Over {found['gpus']} GPUs, which are Python and slower than a driver. The bare script and `pick` make "
        f"the same ten kinds of calls per GPU. {of_import}" + source("pick_speed.py", "pick_speed"),
    )


def prediction(sizes: list[dict[str, Any]], measured_at: int) -> str:
    """Return how far predictions from a training with small batches are from what trains, in words."""
    shares = [1 + row["error"][str(measured_at)] for row in sizes]
    error = sum(abs(share - 1) for share in shares) / len(shares)
    return (
        f"from batches of {measured_at}, {min(shares):.2f} to {max(shares):.2f} times what trains (mean error "
        f"{100 * error:.0f} %)"
    )


def largest_batch() -> str:
    """Return the largest batch that was predicted from small ones, and the largest that trains."""
    found = results("out_of_memory")
    rows = [
        (
            row["model"],
            *(f"{value} ({value / row['found']:.2f})" for value in row["predicted"].values()),
            str(row["found"]),
        )
        for row in found["sizes"]
    ]
    measured_at = list(found["sizes"][0]["predicted"])
    return block(
        table(("model", *(f"predicted from batches of {size}" for size in measured_at), "trains"), *rows),
        source("out_of_memory.py", "out_of_memory"),
    )


def dry_run_peaks() -> str:
    """Return how far the peaks of a simulated T4, and an estimate of them, are from those of a real one."""
    names = ("dry_run_peaks", "dry_run_peaks_torch_2_11")
    found = [results(name) for name in names]
    keys = ("allocated", "reserved")

    def percent(share: float) -> str:
        return f"{100 * share:+.1f} %".replace("-0.0", "0").replace("+0.0", "0")

    def sizes(shares: Sequence[float]) -> str:
        return f"{100 * sum(map(abs, shares)) / len(shares):.1f} % ({percent(min(shares))} to {percent(max(shares))})"

    rows = [
        (
            f"{runs[0]['model']}, {runs[0]['batch']} x {runs[0]['size']}",
            *(format_bytes(runs[0]["real"][key]) for key in keys),
            *(percent(run["error"][key]) for run in reversed(runs) for key in keys),
        )
        for runs in zip(*(one["runs"] for one in found), strict=True)
    ]
    versions = [one["machine"]["torch"] for one in found]
    in_use = [sizes([run["error"]["in use"] for run in one["runs"]]) for one in found]
    estimated = sizes([run["torch-preflight_error"] for run in found[0]["runs"]])
    head = [f"{key}, torch {version}" for version in reversed(versions) for key in keys]
    return block(
        table(("training", "allocated on a real T4", "reserved", *head), *rows),
        "Mean size of the errors (range) of all that the process holds, with its context: "
        f"{in_use[1]} with torch {versions[1]}, with which the peaks were measured; {in_use[0]} with {versions[0]}; "
        f"torch-preflight {found[0]['machine']['torch-preflight']}, which estimates from the network's dimensions, "
        f"{estimated}. {source('dry_run_peaks.py', *names)}",
    )


def dry_run_error() -> str:
    """Return how far the memory of a dry run, and an estimate of it, are from that of real GPUs."""
    t4, estimates, h200 = (
        results(f"{name}") for name in ("dry_run_peaks_torch_2_11", "dry_run_peaks", "h200/dry_run_peaks")
    )

    def sizes(shares: Sequence[float]) -> str:
        return f"{100 * sum(map(abs, shares)) / len(shares):.1f} % ({100 * max(map(abs, shares)):.1f} %)"

    rows = [
        (
            name,
            str(len(ours)),
            sizes([run["error"]["in use"] for run in ours]),
            sizes([run["torch-preflight_error"] for run in theirs]),
        )
        for name, ours, theirs in (
            ("Tesla T4, published by others", t4["runs"], estimates["runs"]),
            ("H200, our own", h200["runs"], h200["runs"]),
        )
    ]
    head = (
        "memory on a real",
        "trainings",
        "`dry-run`: mean error (worst)",
        f"torch-preflight {h200['machine']['torch-preflight']}",
    )
    return table(head, *rows)


def gpu_times(found: Results) -> str:
    known = [(one["forward_ms"], one["forward_ms_known"]) for one in found["answers"] if one["forward_ms_known"]]
    errors = [abs(measured / truth - 1) for measured, truth in known if measured is not None]
    return (
        f"Of {len(known)} of them it is known how long the GPU works in forward: measured in {len(errors)}, at most "
        f"{100 * max(errors):.0f} % off."
    )


OUTCOMES = {
    "names": "right",
    "hints": "hints at it",
    "misses": "another cause",
    "no verdict": "no verdict",
    "false alarm": "false alarm",
}


def diagnosis_on_gpu() -> str:
    """Return what this package and TraceML say of trainings on one GPU."""
    name = "simulated_gpu/gpu_diagnosis"
    found = results(name)

    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    def line(one: Results) -> str:
        return {True: "named", False: "not named"}[one["names_line"]] if one["line_known"] else ""

    theirs = [one["traceml"] or {} for one in found["answers"]]  # empty where TraceML is not installed
    rows = [
        (
            one["training"],
            OUTCOMES["names" if one["right"] else "misses"],
            line(one),
            OUTCOMES.get(other.get("is"), "not run"),
            *(ms(one["forward_ms_known"] and value) for value in (one["forward_ms_known"], one["forward_ms"])),
            ms(one["forward_ms_known"] and other.get("forward_ms")),
        )
        for one, other in zip(found["answers"], theirs, strict=True)
    ]
    version = found["machine"].get("traceml-ai", "is not installed")
    return block(
        f"The trainings on a simulated GPU, with this package and under `traceml run` (TraceML {version}): is the "
        "cause right, is the source line named, and how long does the GPU work in forward?",
        table(("training", "cause", "line", "TraceML: cause", "forward, ms", "measured", "TraceML"), *rows),
        "TraceML names no source lines. Its RESIDUAL-HEAVY counts as a hint at work of the host.",
        source("diagnosis_on_gpu.py", name),
    )
