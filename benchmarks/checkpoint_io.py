"""Time and peak memory of saving and loading, beside Lightning's TorchCheckpointIO.

    python benchmarks/checkpoint_io.py [--gib 2] [--max-minutes 60] [--folder /dev/shm --folder .] [--output FILE]

In each round everything is measured once, in random order and in a fresh process. Rounds are repeated until every
comparison is clearer than its noise, or the time is over: the 95 % interval of the median ratio within a round is
narrower than the ratio's distance from 1, or than 0.2. Data of others that waits to be written would be written at the
expense of the next measurement, so the disks are synced before each.

Files are loaded from a warm page cache: each is read through before. ``TorchCheckpointIO + fsync`` does what it takes
for the durability that ``PortableCheckpointIO`` has. Memory is anonymous memory (what nobody else can use; pages of a
mapped file are the system's to take back), sampled from outside every 3 ms. TMPDIR is the folder itself, so that
Lightning's own temporary file is on the same file system.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe_machine

from lightning_gpu_tools.advice.findings import median_interval

TENSOR_MIB = 32
ACTIONS = (
    ("save", "PortableCheckpointIO"),
    ("save", "TorchCheckpointIO"),
    ("save", "TorchCheckpointIO + fsync"),
    ("async save", "PortableCheckpointIO"),
    ("async save", "TorchCheckpointIO"),
    ("load into a model", "PortableCheckpointIO"),
    ("load into a model", "TorchCheckpointIO"),
)
# By how much the second takes longer than the first.
COMPARED = (
    *((f"{action}, PortableCheckpointIO", f"{action}, TorchCheckpointIO") for action in dict(ACTIONS)),
    ("save, PortableCheckpointIO", "save, TorchCheckpointIO + fsync"),
    ("save, TorchCheckpointIO", "save, TorchCheckpointIO + fsync"),
)
# A median of fewer than 6 has no interval of 95 %.
MIN_ROUNDS = 6
NARROW = 0.2


def child(action: str, plugin_name: str, path: str, gib: float) -> None:
    """Prepare, say so, wait for the word, act, and say how long it took."""
    import torch
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointIO

    plugin: Any = PortableCheckpointIO() if plugin_name.startswith("Portable") else TorchCheckpointIO()
    count = int(gib * 1024 / TENSOR_MIB)
    model = torch.nn.ParameterDict({str(i): torch.ones(TENSOR_MIB << 18) for i in range(count)})
    # Whatever is imported or set up on first use is not what is measured.
    plugin.save_checkpoint({"a": torch.ones(1)}, f"{path}.warm-up")
    plugin.load_checkpoint(f"{path}.warm-up")
    os.unlink(f"{path}.warm-up")
    steps: dict[str, Callable[[], None]] = {
        "save": lambda: plugin.save_checkpoint({"state_dict": model.state_dict()}, path),
        "load into a model": lambda: model.load_state_dict(plugin.load_checkpoint(path)["state_dict"]),
    }
    act = steps.get(action)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    blocked = None
    if act is not None:
        act()
    else:
        threaded = AsyncCheckpointIO(plugin)
        threaded.save_checkpoint({"state_dict": model.state_dict()}, path)
        blocked = time.perf_counter() - start
        threaded.teardown()
    if plugin_name.endswith("fsync"):
        for name, flags in ((path, os.O_RDWR), (os.path.dirname(path), os.O_RDONLY)):
            descriptor = os.open(name, flags)
            os.fsync(descriptor)
            os.close(descriptor)
    print(json.dumps({"seconds": time.perf_counter() - start, "blocked_seconds": blocked}), flush=True)
    sys.stdin.readline()


Runs = dict[str, list[dict[str, Any]]]


def anonymous_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(action: str, plugin: str, folder: Path, gib: float) -> dict[str, float]:
    path = folder / ("to load.ckpt" if action.startswith("load") else "saved.ckpt")
    if action.startswith("load"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    os.sync()
    command = [sys.executable, __file__, "--child", action, plugin, str(path), str(gib)]
    env = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    before = peak = anonymous_mib(process.pid)
    os.set_blocking(process.stdout.fileno(), False)
    process.stdin.write("\n")
    process.stdin.flush()
    while not (answer := process.stdout.readline()):
        peak = max(peak, anonymous_mib(process.pid))
        time.sleep(0.003)
    process.communicate("\n")
    if not action.startswith("load"):
        path.unlink()
    return {**json.loads(answer), "peak_extra_mib": peak - before}


def write_file_to_load(folder: Path, gib: float) -> None:
    import torch

    from lightning_gpu_tools.checkpoints.writing import write_checkpoint

    count = int(gib * 1024 / TENSOR_MIB)
    weights = {str(i): torch.full((TENSOR_MIB << 18,), float(i)) for i in range(count)}
    write_checkpoint({"state_dict": weights}, folder / "to load.ckpt")


def ratio(runs: Runs, first: str, second: str) -> dict[str, Any]:
    ratios = [two["seconds"] / one["seconds"] for one, two in zip(runs[first], runs[second], strict=True)]
    return {"ratio_median": statistics.median(ratios), "ratio_interval": median_interval(ratios)}


def is_clear(compared: dict[str, Any]) -> bool:
    if compared["ratio_interval"] is None:
        return False
    low, high = compared["ratio_interval"]
    return bool(high - low < max(NARROW, abs(compared["ratio_median"] - 1)))


def summarize(found: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [run["seconds"] for run in found]
    blocked = [run["blocked_seconds"] for run in found if run["blocked_seconds"] is not None]
    return {
        "seconds_median": statistics.median(seconds),
        "seconds_interval": median_interval(seconds),
        "seconds_all": sorted(round(each, 3) for each in seconds),
        "blocked_seconds_median": statistics.median(blocked) if blocked else None,
        "peak_extra_mib": max(run["peak_extra_mib"] for run in found),
    }


def run_rounds(folders: dict[str, Path], gib: float, max_minutes: float) -> dict[str, Any]:
    runs: dict[str, Runs] = {kind: {", ".join(pair): [] for pair in ACTIONS} for kind in folders}
    start = time.monotonic()
    rounds, compared, clear = 0, {}, False
    while rounds < MIN_ROUNDS or not (clear or time.monotonic() - start > 60 * max_minutes):
        for kind, pair in random.sample(
            [(kind, pair) for kind in folders for pair in ACTIONS], len(folders) * len(ACTIONS)
        ):
            runs[kind][", ".join(pair)].append(measure(*pair, folders[kind], gib))
            print(".", end="", flush=True, file=sys.stderr)
        rounds += 1
        compared = {
            kind: {f"{second} / {first}": ratio(found, first, second) for first, second in COMPARED}
            for kind, found in runs.items()
        }
        unclear = [name for each in compared.values() for name, one in each.items() if not is_clear(one)]
        clear = not unclear
        print(f" {rounds} rounds, {len(unclear)} comparisons unclear", file=sys.stderr)
    return {
        "repeats": rounds,
        "all_clear": clear,
        "results": {kind: {name: summarize(each) for name, each in found.items()} for kind, found in runs.items()},
        "comparisons": compared,
    }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        action, plugin, path, gib = sys.argv[2:]
        child(action, plugin, path, float(gib))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the weights")
    parser.add_argument("--max-minutes", type=float, default=60.0, help="no new round after this time")
    parser.add_argument("--folder", action="append", help="where to write; default: /dev/shm and the current folder")
    parser.add_argument("--output", type=Path, help="write the numbers to this JSON file too")
    args = parser.parse_args()
    random.seed(0)
    with contextlib.ExitStack() as stack:
        folders = {
            "memory" if place.startswith("/dev/shm") else "disk": Path(
                stack.enter_context(tempfile.TemporaryDirectory(dir=place))
            )
            for place in args.folder or ["/dev/shm", "."]
        }
        for folder in folders.values():
            write_file_to_load(folder, args.gib)
        measured = run_rounds(folders, args.gib, args.max_minutes)
    for kind, results in measured["results"].items():
        print(f"\n{args.gib:g} GiB on {kind}, {measured['repeats']} rounds: median, its 95 % interval, range;")
        print("peak of extra anonymous memory. Loads are from a warm page cache.")
        for name, found in results.items():
            low, high = found["seconds_interval"]
            fastest, *_, slowest = found["seconds_all"]
            blocked = found["blocked_seconds_median"]
            extra = f", training blocked {blocked:.2f} s" if blocked is not None else ""
            print(
                f"{name:45}{found['seconds_median']:7.2f} s  ({low:.2f} to {high:.2f}; {fastest:.2f} to {slowest:.2f})"
                f"{found['peak_extra_mib']:8.0f} MiB{extra}"
            )
        for name, one in measured["comparisons"][kind].items():
            low, high = one["ratio_interval"]
            unclear = "" if is_clear(one) else ", unclear"
            print(f"{name:75}{one['ratio_median']:6.2f}  ({low:.2f} to {high:.2f}{unclear})")
    if args.output:
        result = {"machine": describe_machine(), "gib": args.gib, "page_cache": "warm", **measured}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
