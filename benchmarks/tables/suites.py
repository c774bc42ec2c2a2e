"""Tables about trainings with one known cause each, and about other test suites."""

from __future__ import annotations

from collections import Counter

from . import gpus
from .markdown import RESULTS, block, hardware, results, source, table


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
    versions = ("2.6", "2.8", "2.15")
    of_ranks = [f"simulated_gpu/{ranks}_torch_{version}" for ranks in ("ranks", "four_ranks") for version in versions]
    for found in map(results, of_ranks):
        version = found["machine"]["torch"].rpartition(".")[0]
        words = f"real trainings of {found['ranks']} ranks over NCCL, on simulated GPUs, torch {version}"
        rows.append((words, f"{sum(one['right'] for one in found['answers'])} of {len(found['answers'])}"))
    rows.append(("out of memory, or not, on a simulated GPU", f"{memory['right']} of {memory['of']}"))

    predicted = "; ".join(gpus.prediction(memory["sizes"], size) for size in (8, 32))
    other = peers["machine"]["traceml-ai"]
    of_both = [
        (who, *(str(peers[key].get(outcome, 0)) for outcome in gpus.OUTCOMES))
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
        f"Simulated GPU: {source('diagnosis_on_gpu.py', 'simulated_gpu/gpu_diagnosis')} {gpus.gpu_times(on_gpu)}",
        "Ranks, of which one is late in a known phase, or none is: " + source("diagnosis_of_ranks.py", *of_ranks),
        f"Out of memory: {source('out_of_memory.py', 'out_of_memory')} There the largest batch size that fits was "
        f"predicted for {len(memory['sizes'])} models: {predicted}.",
        f"TraceML {other} (the newest) under `traceml run`, on the {peers['both']} of these trainings on the CPU that "
        "it attaches to (they are our own). Its RESIDUAL-HEAVY hints at callbacks, loggers, checkpoints, validation, "
        "epoch starts and transfers, its COMPUTE-BOUND at backward and the optimizer. Which kind of slow loading it "
        "is does not count here.",
        table((f"of {peers['both']} trainings", *gpus.OUTCOMES.values()), *of_both),
        source("diagnosis_peers.py", "diagnosis_peers"),
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
