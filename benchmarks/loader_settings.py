"""Settings chosen by `find_loader_settings`, compared with the best of an exhaustive grid.

    python benchmarks/loader_settings.py [--budget 9] [--rounds 3] [--cell-seconds 0.8] [--output results.json]
    python benchmarks/loader_settings.py --searches 5 [--only computes] [--output loader_searches.json]

Of five loaders, one waits for storage, one computes, one has occasional slow batches, one is in memory, and one needs
much memory. The training step sleeps, which is how the host sees a step on a GPU. A cell of the grid is a plain loop
over a DataLoader, without the first batches. All cells are measured in turn, round after round, and the median counts.
The best of many noisy numbers is too good, so the choice and the winner are measured again, in turn. Finally,
`examples/train.py` trains with its slow loader, without and with `NumWorkersFinder`. With `--searches`, each loader is
searched that many times instead, and all chosen settings are measured in turn.
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
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from harness import make_parser, write_result
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools import find_loader_settings
from lightning_gpu_tools.reports.report import load_report
from lightning_gpu_tools.types import LoaderResult

Cell = tuple[int, int | None]  # num_workers and prefetch_factor

WORKERS, PREFETCH = range(8), (2, 8)
TEXT = bytes(range(256)) * 400


class Storage(Dataset[torch.Tensor]):
    """A dataset of whole batches that arrive after `seconds(index)`."""

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
    """Batches of 8 MiB, from workers that keep 128 MiB each."""

    cache: torch.Tensor | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.ones(2**25)
        time.sleep(self.seconds(index))
        return torch.full((2**21,), float(index))


def is_slow(index: int) -> bool:
    """Return whether a sample is slow: one in 20, at random, as in a shuffled loader."""
    return zlib.crc32(str(index).encode()) % 20 == 0


class Loader(NamedTuple):
    """A loader of the benchmark.

    Attributes:
        dataset: Returns whole batches.
        step_s: Time of a training step.
        num_workers: The user's setting.
        min_batches: Number of batches that a cell of the grid takes at least.
    """

    dataset: Dataset[torch.Tensor]
    step_s: float
    num_workers: int = 0
    min_batches: int = 20


LOADERS = {
    "waits for storage, 40 ms a batch, step 10 ms": Loader(Storage(lambda i: 0.040), 0.010),
    "computes, step 10 ms": Loader(Computing(lambda i: 40), 0.010),
    "bursts, 200 ms one batch in 20, else 10 ms, step 12 ms": Loader(
        Storage(lambda i: 0.2 if is_slow(i) else 0.01), 0.012, min_batches=200
    ),
    "in memory, step 2 ms, 4 workers now": Loader(InMemory(lambda i: 0.0), 0.002, num_workers=4),
    "memory-hungry, 60 ms a batch, step 25 ms": Loader(Hungry(lambda i: 0.060), 0.025),
}


def make_loader(dataset: Dataset[torch.Tensor], workers: int, prefetch: int | None) -> DataLoader[torch.Tensor]:
    return DataLoader(
        dataset, batch_size=None, num_workers=workers, prefetch_factor=(prefetch or 2) if workers else None
    )


def batches_per_s(loader: DataLoader[torch.Tensor], step_s: float, seconds: float, batches: int) -> float:
    """Loop over a loader for at least some seconds and batches, and return the mean speed after the first batches."""
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


def measured_in_turn(one: Loader, cells: Iterable[Cell], rounds: int, seconds: float) -> dict[Cell, list[float]]:
    """Return the speeds of each cell, one from each round."""
    speeds: dict[Cell, list[float]] = {cell: [] for cell in cells}
    for _ in range(rounds):
        for cell, of_cell in speeds.items():
            of_cell.append(batches_per_s(make_loader(one.dataset, *cell), one.step_s, seconds, one.min_batches))
    return speeds


def named(speeds: dict[Cell, list[float]]) -> dict[str, list[float]]:
    return {f"{workers}x{prefetch}": of_cell for (workers, prefetch), of_cell in speeds.items()}


def search(one: Loader, budget_s: float) -> tuple[LoaderResult, Cell]:
    """Search, and return the search's result with the chosen cell."""
    found = find_loader_settings(make_loader(one.dataset, one.num_workers, None), one.step_s, budget_s=budget_s)
    assert found.settings is not None
    return found, (found.settings.num_workers, found.settings.prefetch_factor)


def measure(one: Loader, args: argparse.Namespace) -> dict[str, Any]:
    """Compare a search's choice with the grid."""
    began_s = time.perf_counter()
    found, choice = search(one, args.budget)
    finder_s = time.perf_counter() - began_s

    began_s = time.perf_counter()
    cells = [(0, None), *itertools.product(WORKERS[1:], PREFETCH)]
    grid = measured_in_turn(one, cells, args.rounds, args.cell_seconds)
    grid_s = time.perf_counter() - began_s

    best = max(grid, key=lambda cell: median(grid[cell]))
    final = measured_in_turn(one, [choice, best], args.rounds, 1.5 * args.cell_seconds)
    chosen_per_s, best_per_s = median(final[choice]), median(final[best])
    return {
        "users_num_workers": one.num_workers,
        "choice": choice,
        "reason": found.reason,
        "trials": [asdict(trial) for trial in found.trials],
        "finder_s": finder_s,
        "best_of_grid": best,
        "grid_s": grid_s,
        "grid_batches_per_s": named(grid),
        "users_batches_per_s": median(grid[one.num_workers, 2 if one.num_workers else None]),
        "choice_batches_per_s": chosen_per_s,
        "best_batches_per_s": best_per_s,
        "share_of_best": chosen_per_s / best_per_s,
        "share_of_grid_time": finder_s / grid_s,
    }


def search_again(one: Loader, args: argparse.Namespace) -> dict[str, Any]:
    """Search several times, and compare the choices."""
    searches = [search(one, args.budget) for _ in range(args.searches)]
    choices = [choice for _, choice in searches]
    speeds = measured_in_turn(one, choices, args.rounds, args.cell_seconds)
    medians = [*map(median, speeds.values())]
    return {
        "choices": choices,
        "seconds": [found.seconds for found, _ in searches],
        "batches_per_s": named(speeds),
        "slowest_choice": min(medians) / max(medians),
    }


def train_example(epochs: int, *options: str) -> dict[str, float]:
    """Train the example, and return its speed in the last third of the steps, and its time."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).parents[1] / "examples" / "train.py"
        command = [sys.executable, str(script), "--epochs", str(epochs), *options]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        (file,) = Path(folder).rglob("gpu_report.json")
        report = load_report(file)
    blocks = report.step_s_blocks[-max(1, len(report.step_s_blocks) // 3) :]
    return {"steps_per_s": 1 / median(blocks), "wall_s": report.wall_s, "steps": report.steps}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--budget", type=float, default=9.0, help="seconds of trials (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the grid (default: %(default)s)")
    parser.add_argument("--cell-seconds", type=float, default=0.8, help="seconds of a cell (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=16, help="epochs of examples/train.py (default: %(default)s)")
    parser.add_argument("--only", default="", help="only loaders whose name contains this text")
    parser.add_argument("--searches", type=int, default=0, help="search each loader this often, without the grid")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    found = {}
    for name, one in LOADERS.items():
        if args.only in name:
            found[name] = search_again(one, args) if args.searches else measure(one, args)
            print(name, *(f"{key}: {value}" for key, value in found[name].items()), sep="\n   ", flush=True)
    more = {}
    if not (args.only or args.searches):
        before, after = train_example(args.epochs), train_example(args.epochs, "--find-workers")
        more["example"] = {"before": before, "after": after}
        print("examples/train.py", json.dumps(more["example"], indent=1))
    benchmark = "loader_searches" if args.searches else "loader_settings"
    write_result(args.output, benchmark, loaders=found, **more)


if __name__ == "__main__":
    main()
