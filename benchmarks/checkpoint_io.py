"""Time and memory of saving and loading checkpoints, compared with Lightning's TorchCheckpointIO and with torch.load.

    python benchmarks/checkpoint_io.py [--gib 2] [--rounds 6] [--output FILE]

Each round measures every action once in each folder, in random order and each in a new process. The disks are synced
before each measurement, which would otherwise include the writing of earlier data. Files are loaded from a warm page
cache. Memory is the peak of what belongs to no file, sampled every 2 ms. ``TorchCheckpointIO + fsync`` makes a file as
durable as ``PortableCheckpointIO`` does. TMPDIR is the folder itself, so that Lightning's temporary file is on the same
file system.
"""

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from harness import make_parser, write_result

TENSOR_MIB = 32
PLACES = {"memory": "/dev/shm", "disk": "."}
ACTIONS = (
    ("save", "PortableCheckpointIO"),
    ("save", "TorchCheckpointIO"),
    ("save", "TorchCheckpointIO + fsync"),
    ("async save", "PortableCheckpointIO"),
    ("async save", "TorchCheckpointIO"),
    ("load into a model", "PortableCheckpointIO"),
    ("load into a model", "TorchCheckpointIO"),
    ("load float16 into a float32 model", "load_weights"),
    ("load float16 into a float32 model", "torch.load"),
    ("load float16 into a float32 model", "torch.load, mmap"),
)


@contextlib.contextmanager
def peak_mib() -> Iterator[list[float]]:
    """Fill the yielded list with the growth of this process's anonymous memory, at its peak."""

    def anonymous_mib() -> float:
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) / 1024

    before, ended = anonymous_mib(), threading.Event()
    seen, peak = [before], list[float]()

    def watch() -> None:
        while not ended.wait(0.002):
            seen[0] = max(seen[0], anonymous_mib())

    thread = threading.Thread(target=watch)
    thread.start()
    yield peak
    ended.set()
    thread.join()
    peak.append(seen[0] - before)


def child(action: str, plugin_name: str, folder: Path, gib: float) -> None:
    """Measure one action in this process, and print its seconds and the memory that it took, in MiB."""
    import torch
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from lightning_gpu_tools import load_weights
    from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointIO

    plugin: Any = PortableCheckpointIO() if plugin_name.startswith("Portable") else TorchCheckpointIO()
    model = torch.nn.ParameterDict({str(i): torch.ones(TENSOR_MIB << 18) for i in range(int(gib * 1024 / TENSOR_MIB))})
    path = folder / "saved.ckpt"
    # Imports and setup on first use are not measured.
    plugin.save_checkpoint({"a": torch.ones(1)}, path)
    plugin.load_checkpoint(path)
    if action.startswith("load"):
        # All load the same file, which writing leaves in the page cache.
        dtype = torch.float16 if "float16" in action else torch.float32
        load_weights(torch.nn.ParameterDict({"a": torch.ones(1)}), path)
        weights = {key: value.to(dtype) for key, value in model.state_dict().items()}
        PortableCheckpointIO().save_checkpoint({"state_dict": weights}, path)
        del weights
    os.sync()
    with peak_mib() as peak:
        began_s = time.perf_counter()
        if action == "save":
            plugin.save_checkpoint({"state_dict": model.state_dict()}, path)
        elif action == "async save":
            threaded = AsyncCheckpointIO(plugin)
            threaded.save_checkpoint({"state_dict": model.state_dict()}, path)
            threaded.teardown()
        elif plugin_name == "load_weights":
            load_weights(model, path)
        elif plugin_name.startswith("torch.load"):
            model.load_state_dict(torch.load(path, "cpu", mmap="mmap" in plugin_name)["state_dict"])
        else:
            model.load_state_dict(plugin.load_checkpoint(path)["state_dict"])
        if plugin_name.endswith("fsync"):
            for name, flags in ((path, os.O_RDWR), (folder, os.O_RDONLY)):
                descriptor = os.open(name, flags)
                os.fsync(descriptor)
                os.close(descriptor)
        took_s = time.perf_counter() - began_s
    print(took_s, peak[0])
    path.unlink()


def measure(action: str, plugin: str, folder: str, gib: float) -> tuple[float, float]:
    """Return the seconds of an action in a new process, and the memory that it took, in MiB."""
    command = [sys.executable, __file__, "--child", action, plugin, folder, str(gib)]
    run = subprocess.run(command, env={**os.environ, "TMPDIR": folder}, stdout=subprocess.PIPE, text=True, check=True)
    seconds, mib = map(float, run.stdout.split())
    return seconds, mib


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        action, plugin, folder, gib = sys.argv[2:]
        child(action, plugin, Path(folder), float(gib))
        return
    parser = make_parser(__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the weights (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="number of rounds (default: %(default)s)")
    args = parser.parse_args()
    measured: dict[str, dict[str, list[tuple[float, float]]]] = {
        kind: {", ".join(pair): [] for pair in ACTIONS} for kind in PLACES
    }
    with contextlib.ExitStack() as stack:
        folders = {kind: stack.enter_context(tempfile.TemporaryDirectory(dir=place)) for kind, place in PLACES.items()}
        for _ in range(args.rounds):
            turns = [(kind, pair) for kind in PLACES for pair in ACTIONS]
            for kind, pair in random.sample(turns, len(turns)):
                measured[kind][", ".join(pair)].append(measure(*pair, folders[kind], args.gib))
    results = {
        kind: {
            name: {
                "seconds_median": median(seconds for seconds, _ in turns),
                "seconds_all": sorted(round(seconds, 3) for seconds, _ in turns),
                "peak_mib_median": round(median(mib for _, mib in turns)),
            }
            for name, turns in of_kind.items()
        }
        for kind, of_kind in measured.items()
    }
    for kind, of_result in results.items():
        print(f"\n{args.gib:g} GiB of float32 on {kind}: median, range, memory")
        for name, one in of_result.items():
            low, *_, high = one["seconds_all"] * 2
            seconds = f"{one['seconds_median']:7.2f} s ({low:.2f} to {high:.2f})"
            print(f"{name:52}{seconds} {one['peak_mib_median']:5} MiB")
    write_result(args.output, "checkpoint_io", gib=args.gib, page_cache="warm", repeats=args.rounds, results=results)


if __name__ == "__main__":
    main()
