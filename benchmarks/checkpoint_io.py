"""Time of saving and loading checkpoints, compared with Lightning's TorchCheckpointIO.

    python benchmarks/checkpoint_io.py [--gib 2] [--rounds 6] [--output FILE]

Each round measures every action once in each folder, in random order and each in a new process. The disks are synced
before each measurement, which would otherwise include the writing of earlier data. Files are loaded from a warm page
cache. ``TorchCheckpointIO + fsync`` makes a file as durable as ``PortableCheckpointIO`` does. TMPDIR is the folder
itself, so that Lightning's temporary file is on the same file system.
"""

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
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
)


def child(action: str, plugin_name: str, folder: Path, gib: float) -> None:
    """Measure one action in this process, and print its seconds."""
    import torch
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointIO

    plugin: Any = PortableCheckpointIO() if plugin_name.startswith("Portable") else TorchCheckpointIO()
    model = torch.nn.ParameterDict({str(i): torch.ones(TENSOR_MIB << 18) for i in range(int(gib * 1024 / TENSOR_MIB))})
    path = folder / "saved.ckpt"
    # Imports and setup on first use are not measured.
    plugin.save_checkpoint({"a": torch.ones(1)}, path)
    plugin.load_checkpoint(path)
    if action.startswith("load"):
        # Both plugins load the same file, which writing leaves in the page cache.
        PortableCheckpointIO().save_checkpoint({"state_dict": model.state_dict()}, path)
    os.sync()
    began_s = time.perf_counter()
    if action == "save":
        plugin.save_checkpoint({"state_dict": model.state_dict()}, path)
    elif action == "async save":
        threaded = AsyncCheckpointIO(plugin)
        threaded.save_checkpoint({"state_dict": model.state_dict()}, path)
        threaded.teardown()
    else:
        model.load_state_dict(plugin.load_checkpoint(path)["state_dict"])
    if plugin_name.endswith("fsync"):
        for name, flags in ((path, os.O_RDWR), (folder, os.O_RDONLY)):
            descriptor = os.open(name, flags)
            os.fsync(descriptor)
            os.close(descriptor)
    print(time.perf_counter() - began_s)
    path.unlink()


def measure(action: str, plugin: str, folder: str, gib: float) -> float:
    """Return the seconds of an action in a new process."""
    command = [sys.executable, __file__, "--child", action, plugin, folder, str(gib)]
    run = subprocess.run(command, env={**os.environ, "TMPDIR": folder}, stdout=subprocess.PIPE, text=True, check=True)
    return float(run.stdout)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        action, plugin, folder, gib = sys.argv[2:]
        child(action, plugin, Path(folder), float(gib))
        return
    parser = make_parser(__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the weights (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="number of rounds (default: %(default)s)")
    args = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {kind: {", ".join(pair): [] for pair in ACTIONS} for kind in PLACES}
    with contextlib.ExitStack() as stack:
        folders = {kind: stack.enter_context(tempfile.TemporaryDirectory(dir=place)) for kind, place in PLACES.items()}
        for _ in range(args.rounds):
            turns = [(kind, pair) for kind in PLACES for pair in ACTIONS]
            for kind, pair in random.sample(turns, len(turns)):
                seconds[kind][", ".join(pair)].append(measure(*pair, folders[kind], args.gib))
    results = {
        kind: {
            name: {"seconds_median": median(values), "seconds_all": sorted(round(one, 3) for one in values)}
            for name, values in of_kind.items()
        }
        for kind, of_kind in seconds.items()
    }
    for kind, of_kind in seconds.items():
        print(f"\n{args.gib:g} GiB on {kind}: median, range")
        for name, values in of_kind.items():
            print(f"{name:45}{median(values):7.2f} s ({min(values):.2f} to {max(values):.2f})")
    write_result(args.output, "checkpoint_io", gib=args.gib, page_cache="warm", repeats=args.rounds, results=results)


if __name__ == "__main__":
    main()
