"""Measure the settings that `find_loader_settings` chooses against the best of an exhaustive grid.

    python benchmarks/loader_settings.py [--budget 9] [--rounds 3] [--cell-seconds 0.8] [--output results.json]
    python benchmarks/loader_settings.py --searches 5 [--only computes] [--output loader_searches.json]

Five loaders: one waits for storage, one computes, one has slow batches now and then, one is in memory, one needs much
memory. The training step sleeps, as it does from the host's view when a GPU computes. Each cell of the grid is a plain
loop over a plain DataLoader, with the first batches left out; all cells are measured in turn, round after round, and
the median counts. As the best of many noisy numbers is too good, choice and winner are then measured once more, in
turn. Last, `examples/train.py` is trained with its slow loader, without and with `NumWorkersFinder`. With `--searches`,
each loader is searched that many times instead, and all that was chosen is measured side by side.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools import find_loader_settings
from lightning_gpu_tools.reports.report_file import load_report

WORKERS, PREFETCH = range(8), (2, 8)
TEXT = bytes(range(256)) * 400


class Storage(Dataset[torch.Tensor]):
    """Each sample is one batch, and takes as long as `seconds(index)` to arrive."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds(index))
        return torch.full((64, 16), float(index))


class Computing(Storage):
    def __getitem__(self, index: int) -> torch.Tensor:
        for _ in range(int(self.seconds(index))):
            zlib.compress(TEXT)
        return torch.full((64, 16), float(index))


class InMemory(Storage):
    samples = torch.rand(10_000, 64)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index % 9_000 : index % 9_000 + 64]


class Hungry(Storage):
    """Batches of 8 MiB, and workers that keep 128 MiB for themselves."""

    cache: torch.Tensor | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.ones(2**25)
        time.sleep(self.seconds(index))
        return torch.full((2**21,), float(index))


def is_slow(index: int) -> bool:
    """Return whether it is one of the slow samples: at random, as where a loader shuffles."""
    return zlib.crc32(str(index).encode()) % 20 == 0


# The dataset, seconds of a step, the user's number of workers, and how many batches a cell of the grid needs at least.
LOADERS: dict[str, tuple[Dataset[torch.Tensor], float, int, int]] = {
    "waits for storage, 40 ms a batch, step 10 ms": (Storage(lambda i: 0.040), 0.010, 0, 20),
    "computes, step 10 ms": (Computing(lambda i: 40), 0.010, 0, 20),
    "bursts, 200 ms one batch in 20, else 10 ms, step 12 ms": (
        Storage(lambda i: 0.2 if is_slow(i) else 0.01),
        0.012,
        0,
        200,
    ),
    "in memory, step 2 ms, 4 workers now": (InMemory(lambda i: 0.0), 0.002, 4, 20),
    "memory-hungry, 60 ms a batch, step 25 ms": (Hungry(lambda i: 0.060), 0.025, 0, 20),
}


def make_loader(dataset: Dataset[torch.Tensor], workers: int, prefetch: int | None) -> DataLoader[torch.Tensor]:
    return DataLoader(
        dataset, batch_size=None, num_workers=workers, prefetch_factor=(prefetch or 2) if workers else None
    )


def batches_per_s(loader: DataLoader[torch.Tensor], step_s: float, seconds: float, batches: int) -> float:
    """Loop over the loader and return its steady speed, by mean over at least `seconds` and `batches`."""
    skip = loader.num_workers * (1 + (loader.prefetch_factor or 0)) + 5
    began_s, count = 0.0, 0
    for i, _ in enumerate(loader):
        now_s = time.perf_counter()
        if i == skip:
            began_s = now_s
        count = i - skip
        if count >= batches and now_s - began_s >= seconds:
            break
        time.sleep(step_s)
    return count / (time.perf_counter() - began_s)


def measure(
    dataset: Dataset[torch.Tensor], step_s: float, users: int, batches: int, args: argparse.Namespace
) -> dict[str, Any]:
    began_s = time.perf_counter()
    found = find_loader_settings(make_loader(dataset, users, None), step_s, budget_s=args.budget)
    finder_s = time.perf_counter() - began_s
    assert found.settings is not None
    choice = (found.settings.num_workers, found.settings.prefetch_factor)

    began_s = time.perf_counter()
    cells = [(0, None), *itertools.product(WORKERS[1:], PREFETCH)]
    seen: dict[tuple[int, int | None], list[float]] = {cell: [] for cell in cells}
    for _ in range(args.rounds):
        for cell, speeds in seen.items():
            speeds.append(batches_per_s(make_loader(dataset, *cell), step_s, args.cell_seconds, batches))
    grid_s = time.perf_counter() - began_s

    best = max(seen, key=lambda cell: median(seen[cell]))
    final: dict[tuple[int, int | None], list[float]] = {choice: [], best: []}
    for _ in range(args.rounds):
        for cell, speeds in final.items():
            speeds.append(batches_per_s(make_loader(dataset, *cell), step_s, 1.5 * args.cell_seconds, batches))
    return {
        "users_num_workers": users,
        "choice": choice,
        "reason": found.reason,
        "trials": [asdict(trial) for trial in found.trials],
        "finder_s": finder_s,
        "best_of_grid": best,
        "grid_s": grid_s,
        "grid_batches_per_s": {f"{workers}x{prefetch}": speeds for (workers, prefetch), speeds in seen.items()},
        "users_batches_per_s": median(seen[users, 2 if users else None]),
        "choice_batches_per_s": median(final[choice]),
        "best_batches_per_s": median(final[best]),
        "share_of_best": median(final[choice]) / median(final[best]),
        "share_of_grid_time": finder_s / grid_s,
    }


def search_again(
    dataset: Dataset[torch.Tensor], step_s: float, users: int, batches: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Search several times, and measure all choices in turn."""
    choices, seconds = [], []
    for _ in range(args.searches):
        found = find_loader_settings(make_loader(dataset, users, None), step_s, budget_s=args.budget)
        assert found.settings is not None
        choices.append((found.settings.num_workers, found.settings.prefetch_factor))
        seconds.append(found.seconds)
    seen: dict[tuple[int, int | None], list[float]] = {choice: [] for choice in choices}
    for _ in range(args.rounds):
        for cell, speeds in seen.items():
            speeds.append(batches_per_s(make_loader(dataset, *cell), step_s, args.cell_seconds, batches))
    fastest = max(map(median, seen.values()))
    return {
        "choices": choices,
        "seconds": seconds,
        "batches_per_s": {f"{workers}x{prefetch}": speeds for (workers, prefetch), speeds in seen.items()},
        "slowest_choice": min(map(median, seen.values())) / fastest,
    }


def show_searches(args: argparse.Namespace) -> dict[str, Any]:
    found = {name: search_again(*loader, args) for name, loader in LOADERS.items() if args.only in name}
    table = Table("loader", "chosen (workers x prefetch)", "batches/s", "slowest choice / fastest", "seconds")
    for name, one in found.items():
        table.add_row(
            name,
            ", ".join(f"{workers}x{prefetch}" for workers, prefetch in one["choices"]),
            ", ".join(f"{cell}: {median(speeds):.1f}" for cell, speeds in one["batches_per_s"].items()),
            f"{one['slowest_choice']:.1%}",
            f"{min(one['seconds']):.1f} to {max(one['seconds']):.1f}",
        )
    Console(width=150).print(table)
    return {"benchmark": "loader_searches", "machine": describe_machine(), "loaders": found}


def train_example(epochs: int, *options: str) -> dict[str, float]:
    """Train the example and return its speed in the last third of its steps, and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).parents[1] / "examples" / "train.py"
        command = [sys.executable, str(script), "--epochs", str(epochs), *options]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        (file,) = Path(folder).rglob("gpu_report.json")
        report = load_report(file)
    blocks = report.step_s_blocks[-max(1, len(report.step_s_blocks) // 3) :]
    return {"steps_per_s": 1 / median(blocks), "wall_s": report.wall_s, "steps": report.steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=9.0, help="seconds of trials (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of the grid (default: %(default)s)")
    parser.add_argument("--cell-seconds", type=float, default=0.8, help="(default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=16, help="of examples/train.py (default: %(default)s)")
    parser.add_argument("--only", default="", help="loaders whose name contains this")
    parser.add_argument("--searches", type=int, default=0, help="search each loader so often, without the grid")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.searches:
        result = show_searches(args)
        if args.output:
            args.output.write_text(json.dumps(result, indent=1) + "\n")
        return

    found = {name: measure(*loader, args) for name, loader in LOADERS.items() if args.only in name}
    columns = ("now", "chosen", "best of the grid", "chosen / best", "finder", "grid")
    table = Table("loader", *columns, title="batches/s with num_workers x prefetch_factor")
    for name, one in found.items():
        chosen, best = ("{}x{}".format(*one[key]) for key in ("choice", "best_of_grid"))
        table.add_row(
            name,
            f"{one['users_batches_per_s']:.1f}",
            f"{one['choice_batches_per_s']:.1f} ({chosen})",
            f"{one['best_batches_per_s']:.1f} ({best})",
            f"{one['share_of_best']:.1%}",
            f"{one['finder_s']:.1f} s",
            f"{one['grid_s']:.0f} s",
        )
    console = Console(width=150)
    console.print(table)
    result = {"benchmark": "loader_settings", "machine": describe_machine(), "loaders": found}
    if not args.only:
        before, after = train_example(args.epochs), train_example(args.epochs, "--find-workers")
        result["example"] = {"before": before, "after": after}
        console.print(
            f"examples/train.py: {before['steps_per_s']:.2f} steps/s as it is, {after['steps_per_s']:.2f} with what "
            f"NumWorkersFinder found ({after['steps_per_s'] / before['steps_per_s']:.2f} times); the whole training "
            f"took {before['wall_s']:.1f} s and {after['wall_s']:.1f} s."
        )
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
