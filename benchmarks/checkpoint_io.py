"""Time and peak memory of saving and loading, beside Lightning's TorchCheckpointIO.

    python benchmarks/checkpoint_io.py [--gib 2] [--repeats 3] [--folder /dev/shm --folder .] [--output FILE]

Every measurement is a fresh process, in random order within each repeat. Memory is anonymous memory (what nobody else
can use; pages of a mapped file are the system's to take back), sampled from outside every 3 ms. TMPDIR is the folder
itself, so that Lightning's own temporary file is on the same file system. ``TorchCheckpointIO + fsync`` does what it
takes for the same durability. Files are warm in the page cache when they are loaded.
"""

import argparse
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


def anonymous_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(action: str, plugin: str, folder: Path, gib: float) -> dict[str, float]:
    path = folder / ("to load.ckpt" if action.startswith("load") else "saved.ckpt")
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


def run_folder(folder: Path, gib: float, repeats: int) -> dict[str, dict[str, Any]]:
    import torch

    from lightning_gpu_tools.checkpoints.torch_files import write_checkpoint

    count = int(gib * 1024 / TENSOR_MIB)
    weights = {str(i): torch.full((TENSOR_MIB << 18,), float(i)) for i in range(count)}
    write_checkpoint({"state_dict": weights}, folder / "to load.ckpt")
    del weights
    runs: dict[tuple[str, str], list[dict[str, float]]] = {pair: [] for pair in ACTIONS}
    for _ in range(repeats):
        for pair in random.sample(ACTIONS, len(ACTIONS)):
            runs[pair].append(measure(*pair, folder, gib))
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return {
        f"{action}, {plugin}": {
            "seconds_median": statistics.median(run["seconds"] for run in found),
            "seconds_all": sorted(round(run["seconds"], 3) for run in found),
            "blocked_seconds_median": statistics.median(run["blocked_seconds"] for run in found)
            if found[0]["blocked_seconds"] is not None
            else None,
            "peak_extra_mib": max(run["peak_extra_mib"] for run in found),
        }
        for (action, plugin), found in runs.items()
    }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        action, plugin, path, gib = sys.argv[2:]
        child(action, plugin, path, float(gib))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the weights")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", action="append", help="where to write; default: /dev/shm and the current folder")
    parser.add_argument("--output", type=Path, help="write the numbers to this JSON file too")
    args = parser.parse_args()
    random.seed(0)
    results: dict[str, Any] = {}
    for place in args.folder or ["/dev/shm", "."]:
        kind = "memory" if place.startswith("/dev/shm") else "disk"
        with tempfile.TemporaryDirectory(dir=place) as folder:
            results[kind] = run_folder(Path(folder), args.gib, args.repeats)
        print(f"\n{args.gib:g} GiB on {kind}, median of {args.repeats} (all), peak of extra anonymous memory:")
        for name, found in results[kind].items():
            blocked = found["blocked_seconds_median"]
            extra = f", training blocked {blocked:.2f} s" if blocked is not None else ""
            spread = "  ".join(f"{seconds:.2f}" for seconds in found["seconds_all"])
            print(f"{name:45}{found['seconds_median']:7.2f} s  ({spread}){found['peak_extra_mib']:8.0f} MiB{extra}")
    if args.output:
        from machine import describe_machine

        result = {"machine": describe_machine(), "gib": args.gib, "repeats": args.repeats, "results": results}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
