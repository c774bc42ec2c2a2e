"""Tables about runs with one known cause each, and about test suites."""

from collections import Counter

from . import gpus
from .markdown import RESULTS, block, hardware, results, source, table


def diagnosis() -> str:
    suite, peers, memory = results("diagnosis_suite"), results("diagnosis_peers"), results("out_of_memory")
    kinds = {
        "on the CPU": "real runs on the CPU",
        "as measurements": "measurements written by hand",
    }
    on_gpu = results("simulated_gpu/gpu_diagnosis")
    gpu_rights = [one["right"] and one["names_line"] for one in on_gpu["answers"]]
    count, right = (Counter(one["ran"] for one in suite["answers"] if one["right"] or every) for every in (True, False))
    rows = [(words, f"{right[kind]} of {count[kind]}") for kind, words in kinds.items() if count[kind]]
    rows.append(("real runs on a simulated GPU", f"{sum(gpu_rights)} of {len(gpu_rights)}"))
    versions = ("2.6", "2.8", "2.15")
    of_ranks = [f"simulated_gpu/{ranks}_torch_{version}" for ranks in ("ranks", "four_ranks") for version in versions]
    for found in map(results, of_ranks):
        version = found["machine"]["torch"].rpartition(".")[0]
        words = f"real runs of {found['ranks']} ranks over NCCL, on simulated GPUs, torch {version}"
        rows.append((words, f"{sum(one['right'] for one in found['answers'])} of {len(found['answers'])}"))
    rows.append(("out-of-memory errors and healthy runs, on a simulated GPU", f"{memory['right']} of {memory['of']}"))
    predicted = "; ".join(gpus.prediction(memory["sizes"], size) for size in (8, 32))
    other = peers["machine"]["traceml-ai"]
    of_both = [
        (who, *(str(peers[key].get(outcome, 0)) for outcome in gpus.OUTCOMES))
        for who, key in (
            ("this package", "ours"),
            (f"TraceML {other}, `traceml run`", "traceml"),
            (f"TraceML {other}, its callback", "traceml_callback"),
        )
    ]
    return block(
        table(("cases with a known cause", "correct diagnoses"), *rows),
        source("diagnosis_suite.py", "diagnosis_suite"),
        f"Simulated GPU: {source('diagnosis_on_gpu.py', 'simulated_gpu/gpu_diagnosis')} {gpus.gpu_times(on_gpu)}",
        "Several ranks, of which at most one is late in a known phase: " + source("diagnosis_of_ranks.py", *of_ranks),
        f"GPU memory: {source('out_of_memory.py', 'out_of_memory')} The same program compares predicted and actual "
        f"largest batch sizes for {len(memory['sizes'])} models: {predicted}.",
        f"The next table shows TraceML {other} (the newest) on the {peers['both']} CPU runs to which it attaches. We "
        "wrote these runs. RESIDUAL-HEAVY counts as a hint at callbacks, loggers, checkpoints, validation, epoch "
        "starts, and transfers. The kind of slow data loading does not count.",
        table((f"of {peers['both']} runs", *gpus.OUTCOMES.values()), *of_both),
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
    """Return the outcomes of Lightning's own tests with this package, and the reasons for differences."""
    found = results("lightning_tests")
    parts = found["parts"].values()
    tests = sum(sum(part["without"].values()) for part in parts)
    modes = {"entry_point": "the monitor and the advisor", "plugin": "PortableCheckpointIO"}
    sentences = []
    for mode, name in modes.items():
        trainings, same = (sum(part[mode][count] for part in parts) for count in ("trainings", "as_without"))
        reasons = Counter(reason for part in parts for reason in part[mode]["known_differences"].values())
        others = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        sentences.append(
            f"With {name} in every Trainer ({trainings:,} fits), {same:,} have the same outcome as without. Of the "
            f"others, {others}."
        )
    return block(
        f"**Lightning's own tests**: {tests:,} tests of version {found['tests_of']}, run with "
        f"{found['machine']['lightning']} ({', '.join(sorted(found['parts']))}). {' '.join(sentences)} "
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
        table(("hanging run", "reported cause", f"reported after `stall_after_s={found['stall_after_s']:g}`"), *rows),
        f"{quiet} of {len(healthy)} healthy runs had no false alarm: {', '.join(one['training'] for one in healthy)}. "
        + source(f"stall_suite.py --stall-after {found['stall_after_s']:g}", "stall_suite"),
    )
