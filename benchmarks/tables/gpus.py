"""Tables about GPUs."""

from collections.abc import Sequence
from typing import Any

from lightning_gpu_tools.units import format_bytes

from .markdown import Results, block, mean_size, milliseconds, results, signed_percent, source, table


def pick_speed() -> str:
    found = results("pick_speed")
    bare_s = found["median_s"]["bare nvidia-ml-py"]
    repeats = len(found["all_s"]["bare nvidia-ml-py"])
    plain, imported = "python -c pass", "import lightning_gpu_tools"
    rows = [
        (name, milliseconds(found["all_s"][name]), f"{seconds / bare_s:.2f}")
        for name, seconds in found["median_s"].items()
        if name not in ("Python alone", plain, imported)
    ]
    ratio = found["median_s"][imported] / found["median_s"][plain]
    return block(
        table(("new process", f"median of {repeats} (range)", "/ bare script"), *rows),
        f"The driver of the {found['gpus']} GPUs is written in C and answers at once. The bare script and "
        f"`pick` make the same ten kinds of calls per GPU. Without GPUs, `{imported}` takes "
        f"{milliseconds(found['all_s'][imported])}, {ratio:.2f} times as long as `{plain}`. "
        + source("pick_speed.py", "pick_speed"),
    )


def prediction(sizes: list[dict[str, Any]], measured_at: int) -> str:
    """Return the errors of predictions from runs with small batches, in words."""
    shares = [1 + row["error"][str(measured_at)] for row in sizes]
    error = sum(abs(share - 1) for share in shares) / len(shares)
    return (
        f"from batches of {measured_at}, {min(shares):.2f} to {max(shares):.2f} times the largest that trains (mean "
        f"error {100 * error:.0f}%)"
    )


def largest_batch() -> str:
    """Return the largest batch sizes: predicted from small ones, and actual."""
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
    """Return the errors of a simulated T4's memory peaks, and of an estimate, compared with a real T4."""
    names = ("dry_run_peaks", "dry_run_peaks_torch_2_11")
    found = [results(name) for name in names]
    keys = ("allocated", "reserved")

    def sizes(shares: Sequence[float]) -> str:
        return f"{mean_size(shares)} ({signed_percent(min(shares))} to {signed_percent(max(shares))})"

    rows = [
        (
            f"{runs[0]['model']}, {runs[0]['batch']} x {runs[0]['size']}",
            *(format_bytes(runs[0]["real"][key]) for key in keys),
            *(signed_percent(run["error"][key]) for run in reversed(runs) for key in keys),
        )
        for runs in zip(*(one["runs"] for one in found), strict=True)
    ]
    versions = [one["machine"]["torch"] for one in found]
    in_use = [sizes([run["error"]["in use"] for run in one["runs"]]) for one in found]
    estimated = sizes([run["torch-preflight_error"] for run in found[0]["runs"]])
    head = [f"{key}, torch {version}" for version in reversed(versions) for key in keys]
    return block(
        table(("training", "allocated on a real T4", "reserved", *head), *rows),
        "Mean absolute error (range) of all of the process's GPU memory, including its context: "
        f"{in_use[1]} with torch {versions[1]}, which measured the real peaks; {in_use[0]} with torch {versions[0]}; "
        f"{estimated} for torch-preflight {found[0]['machine']['torch-preflight']}, which estimates from the network's "
        f"dimensions. {source('dry_run_peaks.py', *names)}",
    )


def dry_run_batches() -> str:
    """Return the verdicts of dry runs on batch sizes that others tried on an RTX 3090."""
    found = results("dry_run_batches")
    sides = found["sides"]

    def judged(side: Results) -> str:
        words = [f"{side['batch']}: {side['verdict'].replace('_', ' ')}"]
        if side["verdict"] != "does_not_fit":
            words.append(f"{100 * side['needed'] / side['usable']:.1f}%")
            words += ["cache emptied"] * bool(side["retries"])
        return ", ".join(words)

    rows = [
        (ran["model"], str(ran["size"]), judged(ran), judged(failed))
        for ran, failed in zip(sides[::2], sides[1::2], strict=True)
    ]
    right = sum(side["verdict"] == ("fits" if side["ran"] else "does_not_fit") for side in sides)
    doubtful = sum(side["verdict"] == "perhaps" for side in sides)
    wrong = len(sides) - right - doubtful
    highest = max(side["needed"] / side["usable"] for side in sides if side["ran"] and side["verdict"] == "fits")
    return block(
        table(("model", "pixels", "ran on a real RTX 3090", "failed there"), *rows),
        f"Of {len(sides)} verdicts, {right} are right, {doubtful} `perhaps`, and {wrong} wrong. "
        f"What ran needed up to {100 * highest:.1f}% of the memory. torch {found['machine']['torch']}, "
        f"timm {found['machine']['timm']}. {source('dry_run_peaks.py --batches', 'dry_run_batches')}",
    )


def published_peaks() -> str:
    """Return the peaks of trainings that others measured, and those on simulated GPUs."""
    trainings = {
        "bert": "bert-large, 512 tokens, V100",
        "lora": "phi-1.5 with LoRA, 1,044 tokens, A100",
        "mlp": "6 linear layers, 4 GPUs",
    }
    names = [f"published_peaks_{name}" for name in trainings]
    rows = [
        (
            f"{training}: {one['name']}",
            format_bytes(one["real"]),
            format_bytes(one["ours"]),
            signed_percent(one["error"]),
        )
        for name, training in zip(names, trainings.values(), strict=True)
        for one in results(name)["runs"]
    ]
    versions = [results(name)["machine"] for name in names]
    return block(
        table(("training", "real GPU", "simulated GPU", "error"), *rows),
        f"torch {versions[0]['torch']}, transformers {versions[0]['transformers']}, litgpt {versions[1]['litgpt']}. "
        f"{source('published_peaks.py', *names)}",
    )


def dry_run_error() -> str:
    """Return the errors of a dry run's memory, and of an estimate, compared with real GPUs."""
    t4, estimates, h200 = (
        results(f"{name}") for name in ("dry_run_peaks_torch_2_11", "dry_run_peaks", "h200/dry_run_peaks")
    )

    def sizes(shares: Sequence[float]) -> str:
        return f"{mean_size(shares)} ({100 * max(map(abs, shares)):.1f}%)"

    rows = [
        (
            name,
            str(len(ours)),
            sizes([run["error"]["in use"] for run in ours]),
            sizes([run["torch-preflight_error"] for run in theirs]),
        )
        for name, ours, theirs in (
            ("Tesla T4, published by others", t4["runs"], estimates["runs"]),
            ("H200, measured by us", h200["runs"], h200["runs"]),
        )
    ]
    head = (
        "memory on a real GPU",
        "runs",
        "`dry-run`: mean error (worst)",
        f"torch-preflight {h200['machine']['torch-preflight']}",
    )
    return table(head, *rows)


def gpu_times(found: Results) -> str:
    known = [(one["forward_ms"], one["forward_ms_known"]) for one in found["answers"] if one["forward_ms_known"]]
    errors = [abs(measured / truth - 1) for measured, truth in known if measured is not None]
    return (
        f"The GPU time of forward is known for {len(known)} of them. It was measured in {len(errors)}, with an error "
        f"of at most {100 * max(errors):.0f}%."
    )


OUTCOMES = {
    "names": "correct",
    "hints": "hint",
    "misses": "another cause",
    "no verdict": "no verdict",
    "false alarm": "false alarm",
}


def line(one: Results) -> str:
    """Return in a word whether a run's first finding names the expected source line."""
    return {True: "correct", False: "missing"}[one["names_line"]] if one["line_known"] else ""


def diagnosis_on_gpu() -> str:
    """Return the answers of this package and of TraceML for runs on one GPU."""
    name = "simulated_gpu/gpu_diagnosis"
    found = results(name)

    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    theirs = [one["traceml"] or {} for one in found["answers"]]  # empty without TraceML
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
        f"Runs on a simulated GPU, with this package and under `traceml run` (TraceML {version}). The table shows the "
        "reported cause and source line, and the GPU time of forward in ms: the true one and the measured ones.",
        table(("run", "cause", "line", "TraceML: cause", "forward", "measured", "TraceML"), *rows),
        "TraceML reports no source lines. Its RESIDUAL-HEAVY counts as a hint at host work.",
        source("diagnosis_on_gpu.py", name),
    )
