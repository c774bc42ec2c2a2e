"""Trainings that end at a random step and are resumed, compared in the last bit with one that never ended.

    python benchmarks/exact_resume.py [--kills 5] [--seed 1] [--output FILE]

Each kind of loader trains with plain Lightning, with ``ExactResume``, and with torchdata's ``StatefulDataLoader`` if
torchdata is installed. A checkpoint is saved after each step. The resumed training begins with other random numbers.
What ``ExactResume`` adds to a batch is CPU time of the training thread: the difference between the medians of its
loader and of torch's, in alternating runs.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import be_quiet, make_parser, quiet_trainer, write_result
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools import ExactResume
from lightning_gpu_tools.loaders.resumable import Positions

SAMPLES, BATCH, EPOCHS = 26, 2, 3
TIMED_BATCHES, TIMED_RUNS = 4000, 9
LOADERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "2 workers": {"shuffle": True, "num_workers": 2},
    "2 persistent workers": {"shuffle": True, "num_workers": 2, "persistent_workers": True},
    "own generator": {"shuffle": True, "generator": True},
}


class Photos(Dataset[torch.Tensor]):
    """Samples with augmentation by each global generator; without one for the time of a batch."""

    def __init__(self, count: int = SAMPLES, *, augments: bool = True) -> None:
        self.count, self.augments = count, augments

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.augments:
            return torch.zeros(4)
        return (index + random.random() + np.random.randn() + torch.rand(4)).float() / SAMPLES


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean() * (1 + random.random())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class End(Callback):
    """Ends a training before a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


def kinds() -> Iterator[tuple[str, Callable[..., Any], list[type]]]:
    """Yield each way to train: its name, its class of loaders, and its callbacks."""
    yield "plain Lightning", DataLoader, []
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        print("torchdata is not installed")
    else:
        yield "StatefulDataLoader", StatefulDataLoader, []
    yield "ExactResume", DataLoader, [ExactResume]


def train(
    folder: Path, load: Callable[[], Any], callbacks: list[Callback], seed: int, **fit: Any
) -> list[torch.Tensor]:
    seed_everything(seed, verbose=False)
    saving = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    model = Model()
    options = {"max_epochs": EPOCHS, "enable_checkpointing": True, "callbacks": [*callbacks, saving]}
    with suppress(SystemExit):  # Lightning's answer to KeyboardInterrupt
        quiet_trainer(folder, **options).fit(model, load(), **fit)
    return [value.clone() for value in model.state_dict().values()]


def is_exact(step: int, make: Callable[..., Any], callbacks: list[type], options: dict[str, Any]) -> bool:
    """Return whether a training that ended after this step, and was resumed, ends with the same weights."""

    def load() -> Any:
        own = {"generator": torch.Generator().manual_seed(3)} if "generator" in options else {}
        return make(Photos(), batch_size=BATCH, **{**options, **own})

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        expected = train(path / "whole", load, [kind() for kind in callbacks], 7)
        train(path / "ended", load, [*(kind() for kind in callbacks), End(step)], 7)
        last = path / "ended" / f"step={step}.ckpt"
        found = train(path / "again", load, [kind() for kind in callbacks], 99, ckpt_path=last)
    return all(map(torch.equal, expected, found))


def batch_us(loader: Any) -> float:
    """Return the median CPU time of the training thread for a batch, in microseconds."""
    times_s = [time.thread_time()]
    times_s += [time.thread_time() for _ in loader]
    return float(median(np.diff(times_s)) * 1e6)


def added_us(workers: int) -> float:
    added = []
    for _ in range(TIMED_RUNS):
        make = partial(DataLoader, Photos(TIMED_BATCHES, augments=False), batch_size=1, num_workers=workers)
        positions = Positions(0, lambda: 0)
        added.append(-batch_us(make()) + batch_us(positions.keep(make(), is_training=True)))
    return median(added)


def state_bytes() -> int:
    """Return how much larger a checkpoint is with the callback's state."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = []
        for callbacks in ([], [ExactResume()]):
            path = Path(folder) / str(len(callbacks))
            train(path, partial(DataLoader, Photos(), batch_size=BATCH), callbacks, 7)
            sizes.append((path / "step=5.ckpt").stat().st_size)
    return sizes[1] - sizes[0]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=5, help="of each kind of loader (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the steps at which they end (default: %(default)s)")
    options = parser.parse_args()
    be_quiet()
    exact: dict[str, dict[str, int]] = {}
    for name, make, callbacks in kinds():
        steps = random.Random(options.seed)
        for loader, settings in LOADERS.items():
            kills = [steps.randrange(1, SAMPLES // BATCH * EPOCHS) for _ in range(options.kills)]
            right = sum(is_exact(step, make, callbacks, settings) for step in kills)
            exact.setdefault(name, {})[loader] = right
            print(f"{name}, {loader}: {right} of {options.kills} exact (ended after steps {kills})", flush=True)
    costs = {f"{workers} workers": added_us(workers) for workers in (0, 2)}
    added_bytes = state_bytes()
    print(f"added to a batch in the training thread: {costs} us; to a checkpoint: {added_bytes} bytes")
    write_result(
        options.output,
        "exact_resume",
        "torchdata",
        kills=options.kills,
        seed=options.seed,
        exact=exact,
        added_us=costs,
        added_bytes=added_bytes,
    )


if __name__ == "__main__":
    main()
