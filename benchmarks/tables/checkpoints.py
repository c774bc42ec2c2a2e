"""Tables about checkpoints."""

from .markdown import block, results, source, table


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
    rules = {"torch": "consume", "this package": "ours"}  # rules for keys that do not have the tool's name
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
        "loaded into a plain network",
        f"keys, of {len(wrappings)} wrappings",
        f"files, of {len(files['ours'])} kinds",
        f"wrong without an error, of {len(harmful['ours'])} bad files",
    )
    return block(
        table(head, *rows),
        f"{versions}. For keys, the other tools' rules are rewritten in the benchmark. Files are loaded with the tools "
        f"themselves. The kinds: {', '.join(files['ours'])}. The bad files: {', '.join(harmful['ours'])}. "
        + source("checkpoint_keys.py", "checkpoint_keys"),
    )


def exact_resume() -> str:
    found = results("exact_resume")
    kinds = [*next(iter(found["exact"].values()))]
    rows = [(name, *(f"{right[kind]} of {found['kills']}" for kind in kinds)) for name, right in found["exact"].items()]
    costs = " and ".join(f"{us:.0f} µs with {workers}" for workers, us in found["added_us"].items())
    return block(
        table(("ends with the same bits", *kinds), *rows),
        f"`ExactResume` adds {costs} to a batch in the training thread, and {found['added_bytes'] / 1000:.0f} kB to a "
        "checkpoint. " + source("exact_resume.py", "exact_resume"),
    )


def crash_consistency() -> str:
    found = results("crash_consistency")
    verdicts = ("PASS", "HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK")
    rows = []
    for name, kills in found["kills"].items():
        given = [kill["verdict"] for kill in kills]
        rows.append((name, str(len(given)), *(str(given.count(verdict)) for verdict in verdicts)))
    machine = found["machine"]
    return block(
        table(("", "kills", *verdicts), *rows),
        f"Judged by ckpt-chaos {machine['ckpt-chaos']}, which others wrote. It ends a run at each file event of "
        "its saves, or there by SIGTERM, or with half of a file. It runs it again from `last`, and compares its "
        "weights in the last bit. It cuts no temporary file of `PortableCheckpointIO`, whose writes it does not see. "
        "HARD_FAIL: it cannot go on. LOST_WORK: it goes on from an older file than it could. The training has shuffled "
        "batches, dropout and augmentation, and saves twice within its epoch. Its temporary files are on another file "
        f"system than its checkpoints, so Lightning {machine['lightning']} copies each of them into place. The runs of "
        "plain Lightning that pass begin again at step 0. " + source("crash_consistency.py", "crash_consistency"),
    )
