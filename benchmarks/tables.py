"""Writes the tables of README.md and docs/: figures from benchmarks/results/, fields from docstrings, and options.

    python -m benchmarks.tables

Each stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. One with figures says how to measure them
again, and on what machine they were measured. A test fails where a table is not what this program writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_gpu_tools.advice.cause import AnyCause
from lightning_gpu_tools.advice.causes import CAUSES
from lightning_gpu_tools.advice.explained import GROUPS, shapes
from lightning_gpu_tools.advice.findings import Diagnosis, Finding, median_interval
from lightning_gpu_tools.advice.memory_account import PARTS, MemoryAccount, OtherProcess
from lightning_gpu_tools.advice.memory_causes import MEMORY_CAUSES
from lightning_gpu_tools.advice.stall_causes import STALL_CAUSES
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.cli import parser
from lightning_gpu_tools.dry_run.result import DryRun
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.processes import ProcessId
from lightning_gpu_tools.reports.report import LoaderSummary, Report
from lightning_gpu_tools.reports.schema import SCHEMA_VERSION
from lightning_gpu_tools.selection.ranking import OPTIONS
from lightning_gpu_tools.training.phases import (
    CALLBACK,
    CHECKPOINT,
    DATA_LOADING,
    EPOCH_START,
    GARBAGE_COLLECTION,
    HOST_TO_DEVICE_COPY,
    LOGGING,
    MONITORING,
    OUTSIDE_LOOP,
    PHASES,
    RANK_WAIT,
    TRAINER,
    TRAINING_STEP,
    UNEXPLAINED,
    VALIDATION,
)
from lightning_gpu_tools.training.run_measurements import RankStep, SourceLine
from lightning_gpu_tools.training.timeline import Series
from lightning_gpu_tools.units import format_bytes, format_duration

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = "../benchmarks/results"  # from a page in docs/
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

MAX_WIDTH = 1.25  # of a range, the upper end over the lower one: our aim
QUIET = 1.2  # load average from which a reader should know of it

Results = dict[str, Any]

CASES = ("chemprop", "gluonts")  # the projects that docs/case_studies.md tells


def results(name: str) -> Results:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def source(command: str, *names: str) -> str:
    """Return how the figures came about: by which command, when, on which machine, with links to them."""
    found = results(names[0])
    machine, load = found["machine"], max(results(name).get("load_average_before", 0.0) for name in names)
    links = ", ".join(f"[{name}.json]({RESULTS}/{name}.json)" for name in names)
    before = f", load average {load:.1f} before" if load > QUIET else ""
    repeat = ", to be repeated on a quiet machine" if load > machine["cores"] else ""
    return f"`python benchmarks/{command}` on {hardware(machine)}, {machine['date']}{before}{repeat}: {links}."


def hardware(machine: Results) -> str:
    return f"{machine['cores']} CPU cores ({machine['processor']}, {machine['memory_gib']:.0f} GiB)"


def table(*rows: Sequence[str]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def block(*parts: str) -> str:
    """Return tables and paragraphs, these wrapped as the pages are."""
    return "\n\n".join(
        part if part.startswith("|") else textwrap.fill(part, 125, break_on_hyphens=False, break_long_words=False)
        for part in parts
    )


def pick_speed() -> str:
    found = results("pick_speed")
    bare_s = found["median_s"]["bare nvidia-ml-py"]
    repeats = len(found["all_s"]["bare nvidia-ml-py"])
    plain, imported = "python -c pass", "import lightning_gpu_tools"
    rows = [
        (name, _ms(found["all_s"][name]), f"{seconds / bare_s:.2f}")
        for name, seconds in found["median_s"].items()
        if name not in ("Python alone", plain, imported)
    ]
    of_import = ""
    if imported in found["median_s"]:
        ratio = found["median_s"][imported] / found["median_s"][plain]
        of_import = f"Without GPUs, `{imported}` takes {_ms(found['all_s'][imported])}, {ratio:.2f} times `{plain}`. "
    return block(
        table(("a new process each", f"median of {repeats} (range)", "/ bare script"), *rows),
        f"Over {found['gpus']} GPUs, which are Python and slower than a driver. The bare script and `pick` make "
        f"the same ten kinds of calls per GPU. {of_import}" + source("pick_speed.py", "pick_speed"),
    )


def _ms(times_s: Sequence[float]) -> str:
    """Return the median and the range in words."""
    return f"{1e3 * median(times_s):.0f} ms ({1e3 * min(times_s):.0f} to {1e3 * max(times_s):.0f})"


def _prediction(sizes: list[dict[str, Any]], measured_at: int) -> str:
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
    """Return how far the memory of a dry run, and an estimate of it, are from that of a real T4."""
    found = results("dry_run_peaks_torch_2_11")
    estimates = results("dry_run_peaks")["runs"]
    errors = {
        f"`dry-run`, torch {found['machine']['torch']} as there": [run["error"]["in use"] for run in found["runs"]],
        f"torch-preflight {found['machine']['torch-preflight']}": [run["torch-preflight_error"] for run in estimates],
    }
    rows = [
        (name, f"{100 * sum(map(abs, of_runs)) / len(of_runs):.1f} %", f"{100 * max(map(abs, of_runs)):.1f} %")
        for name, of_runs in errors.items()
    ]
    return table((f"{len(found['runs'])} trainings on a real Tesla T4", "mean error of the memory", "worst"), *rows)


def _gpu_times(found: Results) -> str:
    known = [(one["forward_ms"], one["forward_ms_known"]) for one in found["answers"] if one["forward_ms_known"]]
    errors = [abs(measured / truth - 1) for measured, truth in known if measured is not None]
    return (
        f"Of {len(known)} of them it is known how long the GPU works in forward: measured in {len(errors)}, at most "
        f"{100 * max(errors):.0f} % off."
    )


_OUTCOMES = {
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
            _OUTCOMES["names" if one["right"] else "misses"],
            line(one),
            _OUTCOMES.get(other.get("is"), "not run"),
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


def diagnosis() -> str:
    suite, peers, memory = results("diagnosis_suite"), results("diagnosis_peers"), results("out_of_memory")
    kinds = {
        "on the CPU": "real trainings on the CPU",
        "as measurements": "measurements written by hand, as such a run would give them",
    }
    on_gpu = results("simulated_gpu/gpu_diagnosis")
    gpu_rights = [one["right"] and one["names_line"] for one in on_gpu["answers"]]
    count, right = (Counter(one["ran"] for one in suite["answers"] if one["right"] or every) for every in (True, False))
    rows = [(words, f"{right[kind]} of {count[kind]}") for kind, words in kinds.items() if count[kind]]
    rows.append(("real trainings on a simulated GPU", f"{sum(gpu_rights)} of {len(gpu_rights)}"))
    of_ranks = {version: results(f"simulated_gpu/ranks_torch_{version}") for version in ("2.8", "2.15")}
    for version, found in of_ranks.items():
        words = f"real trainings of {found['ranks']} ranks over NCCL, on simulated GPUs, torch {version}"
        rows.append((words, f"{sum(one['right'] for one in found['answers'])} of {len(found['answers'])}"))
    rows.append(("out of memory, or not, on a simulated GPU", f"{memory['right']} of {memory['of']}"))

    predicted = "; ".join(_prediction(memory["sizes"], size) for size in (8, 32))
    other = peers["machine"]["traceml-ai"]
    of_both = [
        (who, *(str(peers[key].get(outcome, 0)) for outcome in _OUTCOMES))
        for who, key in (
            ("this package", "ours"),
            (f"TraceML {other}, zero-code", "traceml"),
            (f"TraceML {other}, by its callback", "traceml_callback"),
        )
        if key in peers
    ]
    return block(
        table(("cases with a known cause", "diagnosed right"), *rows),
        source("diagnosis_suite.py", "diagnosis_suite"),
        f"Simulated GPU: {source('diagnosis_on_gpu.py', 'simulated_gpu/gpu_diagnosis')} {_gpu_times(on_gpu)}",
        "Ranks, of which one is late in a known phase, or none is: "
        + source("diagnosis_of_ranks.py", *(f"simulated_gpu/ranks_torch_{version}" for version in of_ranks)),
        f"Out of memory: {source('out_of_memory.py', 'out_of_memory')} There the largest batch size that fits was "
        f"predicted for {len(memory['sizes'])} models: {predicted}.",
        f"TraceML {other} (the newest) under `traceml run`, on the {peers['both']} of these trainings on the CPU that "
        "it attaches to (they are our own). Its RESIDUAL-HEAVY hints at callbacks, loggers, checkpoints, validation, "
        "epoch starts and transfers, its COMPUTE-BOUND at backward and the optimizer. Which kind of slow loading it "
        "is does not count here.",
        table((f"of {peers['both']} trainings", *_OUTCOMES.values()), *of_both),
        source("diagnosis_peers.py", "diagnosis_peers"),
    )


def step_overhead() -> str:
    plain, fake = results("step_overhead"), results("step_overhead_fake_gpus")
    on_gpu = results("simulated_gpu/gpu_step_overhead")

    none, empty, ours = "no callbacks", "two empty callbacks", "monitor + advisor"

    def beyond(found: Results, name: str, other: str, kind: str) -> str:
        beside = found["measured_us"].get(ours if name == empty else name)  # each tool has its own to compare with
        if beside is None or name == other:
            return ""
        values = [a - b for a, b in zip(beside[name][kind], beside[other][kind], strict=True)]
        low, high = median_interval(values) or (min(values), max(values))
        return f"{median(values):+.0f} ({low:+.0f} to {high:+.0f})"

    rows = [
        (
            name,
            beyond(plain, name, none, "wall"),
            beyond(plain, name, empty, "wall"),
            beyond(plain, name, none, "cpu"),
            beyond(fake, name, none, "wall"),
        )
        for name in (empty, *dict.fromkeys([*plain["measured_us"], *fake["measured_us"]]))
    ]
    head = (
        "µs per step",
        "beyond no callbacks",
        "beyond two empty ones",
        "CPU time, beyond none",
        f"{fake['fake_gpus']} fake GPUs, beyond none",
    )
    step_us = median(plain["measured_us"][ours][none]["wall"])
    return block(
        table(head, *rows),
        f"Steps of {step_us / 1e3:.1f} ms; everything at its defaults; `log_every_n_steps=50` unless stated. Medians "
        f"of {plain['rounds']} paired differences ({fake['rounds']} with fake GPUs) between turns of "
        f"{plain['steps_per_turn']} steps, averaged over {plain['processes']} processes of each, with 95 % "
        "intervals, each tool by itself. " + source("step_overhead.py", "step_overhead", "step_overhead_fake_gpus"),
        f"On a simulated GPU the same adds {beyond(on_gpu, ours, none, 'wall')} µs, and two empty callbacks "
        f"{beyond(on_gpu, empty, none, 'wall')}. " + source("step_overhead.py", "simulated_gpu/gpu_step_overhead"),
    )


def source_lines() -> str:
    found = results("source_lines")
    runs = found["runs"]
    rows = [
        (
            name.replace("_", " ").replace("python", "Python").replace("c that", "C that"),
            *(f"{one['true_percent'][name]:.0f} %, {one['seen_percent'][name]:.0f} %" for one in runs.values()),
        )
        for name in next(iter(runs.values()))["true_percent"]
    ]
    counts, costs = ([one[key] for one in runs.values()] for key in ("samples", "us_per_sample"))
    return block(
        table(("truth, sampled, of a line", *runs), *rows),
        f"{min(counts)} to {max(counts)} samples in {found['seconds']:.0f} s each. A sample takes {min(costs):.0f} to "
        f"{max(costs):.0f} µs of CPU time. {source('source_lines.py', 'source_lines')}",
    )


def loader_settings() -> str:
    found = results("loader_settings")

    def settings(choice: tuple[int, int | None], per_s: float) -> str:
        return f"{choice[0]}{f'x{choice[1]}' if choice[0] else ''}: {per_s:.0f}/s"

    rows = [
        (
            name
            + (f", {one['users_num_workers']} workers now" if one["users_num_workers"] and "now" not in name else ""),
            f"{one['users_batches_per_s']:.0f}/s",
            settings(one["choice"], one["choice_batches_per_s"]),
            settings(one["best_of_grid"], one["best_batches_per_s"]),
            f"{one['finder_s']:.1f} of {one['grid_s']:.0f} s",
        )
        for name, one in found["loaders"].items()
    ]
    before, after = (found["example"][when]["steps_per_s"] for when in ("before", "after"))
    return block(
        table(("loader", "before", "chosen (workers x prefetch)", "best of the grid", "finder / grid"), *rows),
        "Batches per second, compared with the best of an exhaustive grid; the step sleeps. `examples/train.py`, which "
        f"computes on the cores that its workers use, went from {before:.1f} to {after:.1f} steps per second. "
        + source("loader_settings.py", "loader_settings"),
    )


def ceilings() -> str:
    """Return what more workers were predicted to bring, and what they brought."""
    found = results("ceilings")
    rows, verdicts = [], []
    for says, is_light in (("as on a GPU", True), ("that compute on the CPU", False)):
        pairs = {name: runs for name, runs in found["pairs"].items() if (name in found["as_on_a_gpu"]) is is_light}
        held = narrow = 0
        for name, runs in pairs.items():
            ranges = [one["predicted"] for one in runs]
            inside = sum(lower <= one["reached"] <= upper for one, (lower, _, upper) in zip(runs, ranges, strict=True))
            held, narrow = held + inside, narrow + (median(upper / lower for lower, _, upper in ranges) <= MAX_WIDTH)
            lower, expected, upper = (f"{median(ends):.2f}" for ends in zip(*ranges, strict=True))
            workers = ", ".join(sorted({str(one["num_workers"]) for one in runs}))
            reached = ", ".join(f"{one['reached']:.2f}x" for one in runs)
            rows.append((name, workers, f"{expected}x ({lower}x to {upper}x)", reached, f"{inside} of {len(runs)}"))
        verdicts.append(
            f"With steps {says}, the speedup reached was within the range in {held} of "
            f"{sum(map(len, pairs.values()))} runs, and the range was at most {MAX_WIDTH:g}x wide in {narrow} of "
            f"{len(pairs)} pairs of loader and step."
        )
    return block(
        table(("training on the CPU", "workers", "predicted (median run)", "reached", "in range"), *rows),
        " ".join(verdicts) + " " + source("ceilings.py", "ceilings"),
    )


def loader_searches() -> str:
    rows = [
        (
            name,
            ", ".join(f"{workers}x{prefetch}" if workers else "0" for workers, prefetch in one["choices"]),
            ", ".join(
                f"{cell.removesuffix('xNone')}: {median(speeds):.0f}/s" for cell, speeds in one["batches_per_s"].items()
            ),
            f"{100 * one['slowest_choice']:.0f} %",
        )
        for name, one in results("loader_searches")["loaders"].items()
    ]
    return block(
        table(
            ("loader", "chosen by five searches (workers x prefetch)", "batches/s", "slowest / fastest choice"), *rows
        ),
        source("loader_settings.py --searches 5", "loader_searches"),
    )


def checkpoint_io() -> str:
    found = results("checkpoint_io")

    def seconds(place: str, action: str) -> str:
        one = found["results"][place][action]
        return f"{one['seconds_median']:.2g} s ({min(one['seconds_all']):.2g} to {max(one['seconds_all']):.2g})"

    ours, theirs = "PortableCheckpointIO", "TorchCheckpointIO"
    cells = [
        ("save to memory", "memory", f"save, {ours}", f"save, {theirs}"),
        ("save to memory under `AsyncCheckpointIO`", "memory", f"async save, {ours}", f"async save, {theirs}"),
        ("save to a disk, both with fsync", "disk", f"save, {ours}", f"save, {theirs} + fsync"),
        ("load into a model, warm page cache", "memory", f"load into a model, {ours}", f"load into a model, {theirs}"),
    ]
    rows = [(what, *(seconds(place, action) for action in actions)) for what, place, *actions in cells]
    return block(
        table((f"{found['gib']:g} GiB", f"`{ours}`", f"Lightning's `{theirs}`"), *rows),
        f"Medians of {found['repeats']} and their ranges. " + source("checkpoint_io.py", "checkpoint_io"),
    )


def checkpoint_keys() -> str:
    found = results("checkpoint_keys")
    files, harmful = found["files"], found["what must not load as it is"]
    rules = {"torch": "consume", "this package": "ours"}  # by which a tool changes keys, if not under its own name
    names = {"this package": "ours", "torch": "torch", "Lightning's `Fabric.load_raw`": "lightning"}
    names |= {tool: tool for tool in ("timm", "mmengine", "accelerate") if tool in files}
    wrappings = [row for table_ in found["who_loads_what"].values() for row in table_.values()]
    rows = []
    for name, tool in names.items():
        rule = rules.get(name, tool)
        keys = str(sum(row[rule] for row in wrappings)) if rule in wrappings[0] else "-"
        loaded, wrong = ([*one[tool].values()].count(what) for one, what in ((files, "loads"), (harmful, "WRONG")))
        rows.append((name, keys, str(loaded), str(wrong)))
    versions = ", ".join(f"{tool} {found['machine'][tool]}" for tool in names.values() if tool != "ours")
    head = (
        "loads into the bare network",
        f"keys, of {len(wrappings)} wrappings",
        f"files, of {len(files['ours'])} kinds",
        f"wrong without an error, of {len(harmful['ours'])} traps",
    )
    return block(
        table(head, *rows),
        f"{versions}. Peers' rules for keys are retyped, files go through the tools themselves. The kinds: "
        f"{', '.join(files['ours'])}. The traps: {', '.join(harmful['ours'])}. "
        + source("checkpoint_keys.py", "checkpoint_keys"),
    )


def versions() -> str:
    runs = results("versions")["runs"]
    rows, notes = [], []
    for run in runs:
        machine = run["machine"]
        torch = machine["torch"].partition("+")[0]
        build = f"CUDA {run['cuda']}" if run["cuda"] else "CPUs"
        counts = (f"{run[kind]:,}" for kind in ("passed", "failed", "skipped"))
        rows.append((machine["python"], f"{torch} for {build}", machine["lightning"], *counts))
        if "note" in run:
            notes.append(f" torch {torch}: {run['note']}")
    machines = ", ".join(sorted({hardware(run["machine"]) for run in runs}))
    dates = ", ".join(sorted({run["machine"]["date"] for run in runs}))
    return block(
        table(("Python", "torch", "Lightning", "passed", "failed", "skipped"), *rows),
        f"`python tests/matrix.py` on {machines}, {dates}: [versions.json]({RESULTS}/versions.json)." + "".join(notes),
    )


def lightning_tests() -> str:
    """Return how Lightning's own tests end with this package, and why some end otherwise."""
    found = results("lightning_tests")
    parts = found["parts"].values()
    tests = sum(sum(part["without"].values()) for part in parts)
    modes = {"entry_point": "the monitor and the advisor in every Trainer", "plugin": "PortableCheckpointIO in each"}
    said = []
    for mode, name in modes.items():
        trainings, same = (sum(part[mode][count] for part in parts) for count in ("trainings", "as_without"))
        reasons = Counter(reason for part in parts for reason in part[mode]["known_differences"].values())
        others = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        said.append(f"With {name} ({trainings:,} trainings), {same:,} end as without; of the others, {others}.")
    return block(
        f"**Lightning's own tests**: {tests:,} of those of {found['tests_of']}, on {found['machine']['lightning']} "
        f"({', '.join(sorted(found['parts']))}). {' '.join(said)} "
        + source("lightning_tests.py CHECKOUT", "lightning_tests")
    )


def real_projects() -> str:
    """Return what each project showed, for a page in docs/."""
    projects = results("real_projects")["projects"]
    head = (
        "project",
        "weights and random numbers",
        "time, zero-code",
        "time, callbacks",
        "verdicts",
        "settings advised",
    )
    rows = []
    for name, found in projects.items():
        runs = found["runs"]
        ours = [one for one in ("zero-code", "callbacks", "finder") if one in runs]
        states = {(run["weights"], run["random_states"]) for one in ("as it is", *ours) for run in runs[one]}
        reports = [run["report"] for one in ours for run in runs[one] if "report" in run]
        verdicts = Counter(report["verdict"] for report in reports)
        findings = [finding for report in reports for finding in report["findings"]]
        promised = [finding["ceiling"] for finding in findings if finding["cause"] == "data_loading"]
        advised = next((one for one in runs if one.startswith("advised")), None)
        reached = f"up to {max(promised):.2f}x promised, {speedup(runs, advised)} reached" if advised else "none"
        rows.append(
            (
                name,
                "equal" if len(states) == 1 else "**different**",
                *(more_time(runs, one) if one in runs else "" for one in ("zero-code", "callbacks")),
                ", ".join(f"{count} x {verdict}" for verdict, count in verdicts.items()) or "no report",
                reached,
            )
        )
    return block(table(head, *rows), how_projects_ran(*projects))


def case(project: str) -> str:
    """Return the times of everything that was tried with one project, for a page in docs/."""
    runs = results("real_projects")["projects"][project]["runs"]
    head = ("", "`Trainer.fit`", "speedup", "CPU time")
    rows = [
        (
            f"{name}{searched(found)}",
            spread([run["fit_s"] for run in found], "{:.1f} s"),
            speedup(runs, name),
            spread([run["cpu_s"] for run in found], "{:.1f} s"),
        )
        for name, found in runs.items()
    ]
    return block(table(head, *rows), how_projects_ran(project))


def searched(found: Sequence[Results]) -> str:
    searches = [run["report"]["search"] for run in found if run.get("report", {}).get("search")]
    return f", {median(one['seconds'] for one in searches):.1f} s of it searching" if searches else ""


def spread(values: Sequence[float], form: str) -> str:
    """Return the median, and the range of several values."""
    shown = form.format(median(values))
    return f"{shown} ({form.format(min(values))} to {form.format(max(values))})" if len(values) > 1 else shown


def in_rounds(runs: Results, name: str, key: str) -> list[tuple[float, float]]:
    """Return what the project as it is and another variant took, by round."""
    return [(one[key], other[key]) for one, other in zip(runs["as it is"], runs[name], strict=True)]


def more_time(runs: Results, name: str) -> str:
    wall, cpu = (
        spread([100 * (other / plain - 1) for plain, other in in_rounds(runs, name, key)], "{:+.0f} %")
        for key in ("fit_s", "cpu_s")
    )
    return f"{wall}, CPU {cpu}"


def speedup(runs: Results, name: str) -> str:
    return spread([plain / other for plain, other in in_rounds(runs, name, "fit_s")], "{:.2f}x")


def how_projects_ran(*names: str) -> str:
    found = [results("real_projects")["projects"][name] for name in names]
    plain = [run for project in found for run in project["runs"]["as it is"]]
    versions = {f"{name} {version}" for run in plain for name, version in run["versions"].items()}
    loads = [run["load_average_before"] for project in found for runs in project["runs"].values() for run in runs]
    threads = " or ".join(sorted({str(run["threads"]) for run in plain}))
    rounds = " or ".join(sorted({str(len(project["runs"]["as it is"])) for project in found}))
    machines = {
        f"{project['machine']['date']}, {project['machine']['cores']} cores of a shared virtual machine "
        f"({project['machine']['processor']})"
        for project in found
    }
    return (
        f"Medians and ranges of {rounds} rounds; times are compared within a round. Threads of PyTorch "
        f"(`OMP_NUM_THREADS`): {threads}. Load average before a run: {min(loads):.1f} to {max(loads):.1f}. "
        f"{', '.join(sorted(versions))}. `python benchmarks/real_projects.py {' '.join(names)}`, "
        f"{'; '.join(sorted(machines))}: [real_projects.json]({RESULTS}/real_projects.json)."
    )


def scale() -> str:
    found = results("scale")
    sizes = found["sizes"]

    def row(name: str, value: Callable[[Results], str]) -> tuple[str, ...]:
        return name, *map(value, sizes)

    rows = [
        row("to hand over what it publishes, in the training thread", lambda one: format_duration(one["publish_s"])),
        row("to read all ranks, in a thread", lambda one: format_duration(one["gather_s"])),
        row("of that, CPU time", lambda one: format_duration(one["gather_cpu_s"])),
        row("the same rank by rank, as a comparison", lambda one: format_duration(one["one_by_one_s"])),
        row("to take in what came, in that thread", lambda one: format_duration(one["list_s"])),
        row("to compare the ranks", lambda one: format_duration(one["judge_s"])),
        row("to end, all ranks there", lambda one: format_duration(one["end_s"])),
        row("to end, all others dead", lambda one: format_duration(one["end_dead_s"]["all others"])),
        row("report as text", lambda one: f"{one['text_lines']} lines, {format_duration(one['text_s'])}"),
        row("`gpu_report.json`", lambda one: f"{format_bytes(one['json_bytes'])}, {format_duration(one['json_s'])}"),
        row("picture", lambda one: f"{format_bytes(one['picture_bytes'])}, {format_duration(one['picture_s'])}"),
    ]
    if "running_report_s" in sizes[0]:
        rows[6:6] = [
            row("the running report, in the training thread", lambda one: format_duration(one["running_report_s"])),
            row("the same in a thread, CPU time", lambda one: format_duration(one["running_report_thread_cpu_s"])),
            row("longest pause of the training meanwhile", lambda one: format_duration(one["running_report_pause_s"])),
            row("all of it in the training thread", lambda one: format_duration(one["running_report_all_here_s"])),
        ]
    named = [one["named"] or "nobody" for one in found["real"]]
    ranks = len(found["real"][0]["ranks"])
    return block(
        table(("rank 0 of a job of", *(f"{one['ranks']:,} ranks" for one in sizes)), *rows),
        "Eight ranks a node, as entries in a real TCPStore, over a relay with a round trip of "
        f"{format_duration(found['round_trip_s'])}. {ranks} real ranks with gloo, on four nodes of torchrun that are "
        f"one machine, made one report with all ranks each time. It named {named[1]} where that was slow, {named[2]} "
        f"where all ranks of that were, and {named[0]} where none was. " + source("scale.py", "scale"),
    )


def stalls() -> str:
    found = results("stall_suite")
    rows = [
        (one["training"], f"`{one['said']}`" + (" (wrong)" if not one["right"] else ""), f"{one['late_s']:.1f} s")
        for one in found["answers"]
        if one["known"]
    ]
    healthy = [one for one in found["answers"] if not one["known"]]
    quiet = sum(one["right"] for one in healthy)
    return block(
        table(("what hangs", "named", f"after `stall_after_s={found['stall_after_s']:g}`"), *rows),
        f"No false alarms in {quiet} of {len(healthy)} healthy runs: "
        + ", ".join(one["training"] for one in healthy)
        + ". "
        + source("stall_suite.py", "stall_suite"),
    )


def fields(kind: type) -> str:
    """Return the fields of a dataclass as its JSON object has them, with what their docstrings say."""
    described = inspect.getdoc(kind).split("Attributes:\n", 1)[1]  # type: ignore[union-attr]
    hints = get_type_hints(kind)
    rows = []
    for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", described, re.MULTILINE):
        meaning = re.sub(r"\s+", " ", text).replace("``None``", "``null``").replace("``", "`")
        meaning = meaning.replace("see docs/report_schema.md", "see [Phases](#phases)")
        rows.append((f"`{name}`", in_json(hints[name]), meaning))
    assert [row[0] for row in rows] == [f"`{field.name}`" for field in dataclasses.fields(kind)], kind
    first = (
        ("`schema_version`", "integer", str(SCHEMA_VERSION)),
        ("`summary`", "object", "The verdict and the first finding in short; see [below](#summary)."),
    )
    return table(("field", "type", "meaning"), *(first if kind is Report else ()), *rows)


def in_json(kind: Any) -> str:
    """Return what a type is in JSON, in words."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join("null" if one is NoneType else in_json(one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return "string"
    is_object = dataclasses.is_dataclass(kind) or get_origin(kind) is Mapping
    return {bool: "boolean", int: "integer", float: "number", str: "string"}.get(
        kind, "object" if is_object else "list"
    )


_IN_PHASE = {
    CALLBACK: "in a hook of a callback, the model, the DataModule or the strategy, or in a learning rate scheduler",
    LOGGING: "in a logger, or collecting the metrics of `self.log`",
    CHECKPOINT: "in a checkpoint callback, or saving one",
    VALIDATION: "in validation",
    OUTSIDE_LOOP: "in a loop without a Trainer: in code outside of `run.batches`",
    MONITORING: "in a hook of this package",
    GARBAGE_COLLECTION: "in Python's garbage collector, beyond its youngest generation",
    TRAINER: "in the Trainer's own work around a step",
    RANK_WAIT: "waiting in a collective for other ranks; after the slash, what it was doing. Includes the check of "
    "signals in every step, where a rank also waits for its own GPU",
    UNEXPLAINED: "anywhere else",
    EPOCH_START: "starting an epoch: its iterator, its workers, its first batch",
    DATA_LOADING: "waiting for a batch",
    HOST_TO_DEVICE_COPY: "moving the batch to the device",
    TRAINING_STEP: "in forward, backward and optimizer",
}


def phases() -> str:
    rows = [(f"`{phase}`", _IN_PHASE[phase]) for phase in PHASES]
    return table(("phase", "the training thread is"), *rows)


def causes(known: Mapping[str, AnyCause]) -> str:
    """Return the causes of a folder, what the report says of each, what to change, and where it was seen."""
    rows = [
        (
            _named(cause.name, shape.kind),
            shape.says,
            shape.change,
            cause.verified_on,
        )
        for cause in known.values()
        for shape in cause.shapes
    ]
    return table(("cause", "the report says", "what to change", "seen on"), *sorted(rows))


def stall_causes() -> str:
    """Return what makes a training stand still, how that looks, what to change, and where it was seen."""
    rows = [(f"`{one.name}`", one.seen_as, one.change, one.verified_on) for one in STALL_CAUSES.values()]
    return table(("cause", "what you see", "what to change", "seen on"), *sorted(rows))


def all_causes() -> str:
    """Return the causes of all folders, and what to change."""
    rows = [
        (_named(name, shape.kind), group.title, shape.change.replace("](#", f"]({group.page}#"))
        for group in GROUPS
        for name, cause in sorted(group.causes.items())
        for shape in shapes(cause)
    ]
    return table(("cause", "of", "what to change"), *rows)


def _named(cause: str, kind: str) -> str:
    return f"`{cause}`" + (f", `{kind}`" if kind else "")


def memory_parts() -> str:
    return table(("part", "what it is"), *((f"`{part.name}`", part.meaning) for part in PARTS.values()))


def options() -> str:
    """Return the options of a selection, which the accelerator and the strategies share."""
    return table(("option", "meaning"), *((f"`{name}`", text) for name, text in OPTIONS.items()))


def commands() -> str:
    """Return what each command does, with its arguments."""
    parts = []

    def add(command: argparse.ArgumentParser) -> None:
        actions = [one for one in command._actions if not isinstance(one, argparse._HelpAction)]
        nested = next((one for one in actions if isinstance(one, argparse._SubParsersAction)), None)
        if nested is None:
            rows = [(f"`{in_words(one)}`", (one.help or "") % vars(one)) for one in actions]
            parts.extend([f"## {command.prog}", command.description or "", table(("argument", "meaning"), *rows)])
        for one in dict.fromkeys(nested.choices.values()) if nested else ():
            add(one)

    add(parser())
    return "\n\n".join(part if part.startswith(("|", "#")) else block(part) for part in parts)


def in_words(action: argparse.Action) -> str:
    """Return an argument as a reader of ``--help`` knows it."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
    value = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper())
    return f"{', '.join(action.option_strings)} {value}".strip()


def figures() -> str:
    """Return the main figures; the tables below them have all."""
    peers, overhead, picks = results("diagnosis_peers"), results("step_overhead")["measured_us"], results("pick_speed")
    loads, saves, searches = results("checkpoint_keys"), results("checkpoint_io"), results("loader_settings")
    stalls = [one for one in results("stall_suite")["answers"] if one["known"]]
    large = next(one for one in results("scale")["sizes"] if one["ranks"] == 1024)

    def beyond_us(name: str) -> str:
        of_tool = overhead["monitor + advisor" if name == "two empty callbacks" else name]
        beyond = [a - b for a, b in zip(of_tool[name]["wall"], of_tool["no callbacks"]["wall"], strict=True)]
        low, high = median_interval(beyond) or (min(beyond), max(beyond))
        return f"{median(beyond):.0f} µs ({low:.0f} to {high:.0f})"

    def saved_s(who: str) -> str:
        return f"{saves['results']['memory'][f'save, {who}']['seconds_median']:.1f} s"

    def loaded(*tools: str) -> str:
        return ", ".join(f"{tool} {[*loads['files'][tool].values()].count('loads')}" for tool in tools)

    def took_s(key: str) -> str:
        seconds = [one[key] for one in searches["loaders"].values()]
        return f"{min(seconds):.1f} to {max(seconds):.1f} s"

    ms = {name: _ms(times_s) for name, times_s in picks["all_s"].items()}
    peers_of_pick = ("nvisel", "gpu-gate")
    device_stats = "DeviceStatsMonitor, log_every_n_steps=50"
    step_ms = median(overhead["monitor + advisor"]["no callbacks"]["wall"]) / 1e3
    rows = [
        (
            f"correct diagnoses of {peers['both']} CPU test runs that we wrote",
            str(peers["ours"]["names"]),
            f"TraceML {peers['traceml']['names']}",
            "diagnosis_peers",
        ),
        (
            f"correct causes of {len(stalls)} kinds of hanging runs",
            str(sum(one["right"] for one in stalls)),
            "",
            "stall_suite",
        ),
        (
            f"overhead per step of {step_ms:.1f} ms, at all defaults",
            beyond_us("monitor + advisor"),
            f"two empty callbacks {beyond_us('two empty callbacks')}, DeviceStatsMonitor {beyond_us(device_stats)}"
            + (f", TraceML {beyond_us('TraceML')}" if "TraceML" in overhead else ""),
            "step_overhead",
        ),
        (
            f"collecting the measurements of {large['ranks']:,} ranks on rank 0 (in a thread, once a minute)",
            format_duration(large["gather_s"]),
            f"rank by rank {format_duration(large['one_by_one_s'])}",
            "scale",
        ),
        (
            f"a cold `pick` on {picks['gpus']} GPUs",
            ms["lightning-gpu-tools pick"],
            ", ".join(f"{name} {ms[name]}" for name in ("bare nvidia-ml-py", *peers_of_pick) if name in ms),
            "pick_speed",
        ),
        ("search for DataLoader settings", took_s("finder_s"), f"the whole grid {took_s('grid_s')}", "loader_settings"),
        (
            f"kinds of checkpoints that load into a plain network, of {len(loads['files']['ours'])}",
            str([*loads["files"]["ours"].values()].count("loads")),
            loaded("timm", "mmengine", "accelerate", "torch"),
            "checkpoint_keys",
        ),
        (
            f"saving {saves['gib']:g} GiB to memory",
            saved_s("PortableCheckpointIO"),
            f"Lightning {saved_s('TorchCheckpointIO')}",
            "checkpoint_io",
        ),
    ]
    if "import lightning_gpu_tools" in ms:
        python = f"Python alone {ms['python -c pass']}"
        rows.insert(5, ("`import lightning_gpu_tools`", ms["import lightning_gpu_tools"], python, "pick_speed"))
    measured = [(*row[:3], f"`{row[3]}.py`, {results(row[3])['machine']['date']}") for row in rows]
    machines = sorted({hardware(results(row[3])["machine"]) for row in rows})
    return block(
        table(("", "this package", "others", "measured by"), *measured),
        f"Each by `python benchmarks/NAME.py` on {', '.join(machines)}, which writes [the raw results]({RESULTS}).",
    )


TABLES: dict[str, Callable[[], str]] = {
    **{
        one.__name__: one
        for one in (
            pick_speed,
            ceilings,
            diagnosis,
            diagnosis_on_gpu,
            largest_batch,
            dry_run_peaks,
            dry_run_error,
            step_overhead,
            source_lines,
            loader_settings,
            loader_searches,
            checkpoint_keys,
            checkpoint_io,
            versions,
            lightning_tests,
            phases,
            memory_parts,
            real_projects,
            scale,
            stalls,
            stall_causes,
            all_causes,
            options,
            commands,
            figures,
        )
    },
    "causes": functools.partial(causes, CAUSES),
    "memory_causes": functools.partial(causes, MEMORY_CAUSES),
    **{f"case_{name.replace('-', '_')}": functools.partial(case, name) for name in CASES},
    **{
        kind.__name__: functools.partial(fields, kind)
        for kind in (
            *(Report, GpuSummary, Diagnosis, Finding, RankStep, SourceLine, MemoryAccount, OtherProcess),
            *(LoaderSummary, ProcessId, Series, Stall, DryRun),
        )
    },
}


def filled(page: str) -> str:
    """Return a page with its tables made anew."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", page)


def main() -> None:
    for path in PAGES:
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
