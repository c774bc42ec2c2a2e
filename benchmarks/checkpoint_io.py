"""Time and peak memory of saving and loading checkpoints, compared with Lightning's TorchCheckpointIO.

    python benchmarks/checkpoint_io.py [--gib 2] [--max-minutes 60] [--folder /dev/shm --folder .] [--output FILE]

Each round measures every action once, in random order, each in a new process. Rounds repeat until every comparison is
clear, or the time is up. A comparison is clear if the 95 % interval of the median ratio within a round is narrower than
the ratio's distance from 1, or than 0.2. The disks are synced before each measurement, which would otherwise include
the writing of earlier data.

Files are loaded from a warm page cache. ``TorchCheckpointIO + fsync`` makes a file as durable as
``PortableCheckpointIO`` does. Memory is anonymous memory, sampled from another process every 3 ms; the system can
reclaim the pages of a mapped file. TMPDIR is the folder itself, so that Lightning's temporary file is on the same file
system.
"""

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

from harness import make_parser, write_result

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
# Pairs whose ratio of times is reported: the second over the first.
COMPARED = (
    *((f"{action}, PortableCheckpointIO", f"{action}, TorchCheckpointIO") for action in dict(ACTIONS)),
    ("save, PortableCheckpointIO", "save, TorchCheckpointIO + fsync"),
    ("save, TorchCheckpointIO", "save, TorchCheckpointIO + fsync"),
)
MIN_ROUNDS = 6  # the median of fewer values has no 95 % interval
NARROW = 0.2


def child(action: str, plugin_name: str, path: str, gib: float) -> None:
    """Prepare, print "ready", wait for a line of input, act, and print the time it took."""
    import torch
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointIO

    plugin: Any = PortableCheckpointIO() if plugin_name.startswith("Portable") else TorchCheckpointIO()
    count = int(gib * 1024 / TENSOR_MIB)
    model = torch.nn.ParameterDict({str(i): torch.ones(TENSOR_MIB << 18) for i in range(count)})
    # Imports and setup on first use are not measured.
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
    parser = make_parser(__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the weights (default: %(default)s)")
    parser.add_argument("--max-minutes", type=float, default=60.0, help="start no round after (default: %(default)s)")
    parser.add_argument("--folder", action="append", help="where to write (default: /dev/shm and the current folder)")
    args = parser.parse_args()
    random.seed(0)
    with contextlib.ExitStack() as stack:
        folders = {}
        for place in args.folder or ["/dev/shm", "."]:
            kind = "memory" if place.startswith("/dev/shm") else "disk"
            folders[kind] = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
            write_file_to_load(folders[kind], args.gib)
        measured = run_rounds(folders, args.gib, args.max_minutes)
    for kind, results in measured["results"].items():
        print(f"\n{args.gib:g} GiB on {kind}, {measured['repeats']} rounds: median (95 % interval), peak memory")
        for name, found in results.items():
            low, high = found["seconds_interval"]
            seconds, peak_mib = found["seconds_median"], found["peak_extra_mib"]
            print(f"{name:45}{seconds:7.2f} s ({low:.2f} to {high:.2f}) {peak_mib:7.0f} MiB")
        for name, one in measured["comparisons"][kind].items():
            low, high = one["ratio_interval"]
            unclear = "" if is_clear(one) else ", unclear"
            print(f"{name:75}{one['ratio_median']:6.2f}  ({low:.2f} to {high:.2f}{unclear})")
    write_result(args.output, "checkpoint_io", gib=args.gib, page_cache="warm", **measured)


if __name__ == "__main__":
    main()
