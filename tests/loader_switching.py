"""Trainings whose loader is changed at a step that a test says, and what they must be equal to."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler
from trainings import Boom, Model, quiet_trainer

from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.loaders import plan, search
from lightning_gpu_tools.loaders.passes import continued, random_states
from lightning_gpu_tools.trainer import num_workers_finder
from lightning_gpu_tools.types import LoaderSettings


def settings(workers: int, persistent: bool = False) -> LoaderSettings:
    return LoaderSettings(
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        persistent_workers=persistent,
        pin_memory=False,
    )


def arguments(chosen: LoaderSettings) -> dict[str, Any]:
    """Return settings as a DataLoader's constructor takes them."""
    if not chosen.num_workers:
        return {}
    return {"num_workers": chosen.num_workers, "persistent_workers": chosen.persistent_workers}


class Items(Dataset[torch.Tensor]):
    def __init__(self, count: int = 26, draws: bool = False) -> None:
        self.count, self.draws = count, draws

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [torch.rand(1).item(), random.random(), np.random.rand()] if self.draws else [0.0] * 3
        return torch.tensor([float(index), *noise])


class Uneven(Sampler[list[int]]):
    """A batch sampler that draws when iter() is called, and whose batches are of 1 to 5 items."""

    def __iter__(self) -> Iterator[list[int]]:
        order, sizes = torch.randperm(26).tolist(), itertools.cycle((3, 1, 5, 2))

        def batches() -> Iterator[list[int]]:
            while order:
                yield [order.pop() for _ in range(min(next(sizes), len(order)))]

        return batches()

    def __len__(self) -> int:
        return 10


class DrawsAlways(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return (random.randrange(26) for _ in range(26))

    def __len__(self) -> int:
        return 26


class Wrapping(DataLoader[Any]):
    """A loader that does more with its batches, and begins when the first one is asked for."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch + 100


ITEMS, DRAWING = Items(), Items(draws=True)
LOADERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "shuffled": lambda **own: DataLoader(ITEMS, 3, shuffle=True, **own),
    "generator": lambda **own: DataLoader(ITEMS, 3, shuffle=True, generator=torch.Generator().manual_seed(3), **own),
    "sequential": lambda **own: DataLoader(ITEMS, 3, **own),
    "batch_sampler": lambda **own: DataLoader(ITEMS, batch_sampler=Uneven(), **own),
    "single": lambda **own: DataLoader(ITEMS, batch_size=None, sampler=RandomSampler(ITEMS, num_samples=9), **own),
    "drop_last": lambda **own: DataLoader(ITEMS, 3, shuffle=True, drop_last=True, **own),
    "subclass": lambda **own: Wrapping(ITEMS, 3, shuffle=True, **own),
    "drawing": lambda **own: DataLoader(DRAWING, 3, shuffle=True, **own),
}
# Workers before and after, and whether they live on between epochs.
CHANGES = [
    (settings(before, kept_before), settings(after, kept_after))
    for before, kept_before, after, kept_after in (
        (0, False, 2, False),
        (0, False, 2, True),
        (2, False, 0, False),
        (2, True, 1, True),
        (1, True, 2, False),
    )
]


def shorten_trials(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Try a few batches of a few settings: enough where loading is waiting, and takes four times as long as a step."""
    few = {"_MAX_PROBED": 6, "_MIN_BATCHES": 8, "_MIN_SECONDS": 0.1, "_PRECISION": 1.0}
    for name, value in few.items():
        set_attribute(search, name, value)
    set_attribute(plan, "_TRIALS_OF_CLOSE", 1)
    set_attribute(plan, "_REPRODUCED", 10.0)  # so short a study says little on a busy machine
    host = HostBudget(cores=1.0, memory_available_bytes=2**36, shm_free_bytes=None)  # at most four workers
    set_attribute(num_workers_finder, "read_host_budget", lambda local_ranks: host)


def frozen_states() -> tuple[Any, ...]:
    """Return the global random states as something that can be compared with ==."""
    torch_state, numpy_state, python_state = random_states()
    return torch_state.numpy().tobytes(), numpy_state[1].tobytes(), numpy_state[2:], python_state


class Drawing(Model):
    """A model that notes its batches, and random numbers as dropout draws them in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[float]] = []
        self.numbers: list[tuple[float, ...]] = []
        self.states: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        self.batches.append([float(item) for part in parts for item in part.reshape(-1, 4)[:, 0]])
        self.numbers.append((torch.rand(1).item(), random.random(), np.random.rand()))
        return self.layer(torch.ones(1, 4)).sum()

    def on_train_epoch_end(self) -> None:
        self.states.append(frozen_states())


class Watch(Callback):
    """Notes what a training does from step to step."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.states: list[Any] = []
        self.workers: list[int] = []
        self.loader: Any = None  # of the Trainer

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.batches.append((batch[0] if isinstance(batch, list) else batch).flatten().tolist())
        self.states.append(frozen_states())
        self.loader = trainer.train_dataloader
        self.workers.append(getattr(self.loader, "num_workers", -1))


class SwitchAt(Callback):
    """A callback that changes the settings of all training loaders after some batches of an epoch."""

    def __init__(self, epoch: int = 0, done: int = 4, after: LoaderSettings | None = None) -> None:
        self.epoch, self.done, self.after = epoch, done, after
        self.made: list[tuple[Any, Any]] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        process = trainer.strategy.process_dataloader

        def process_dataloader(given: object) -> object:
            loader = process(given)
            if not trainer.training:
                return loader
            for known, made in self.made:
                if loader in (known, made):
                    return made
            made = continued(loader)  # type: ignore[arg-type]
            if self.made:
                made.loading.use(self.made[0][1].loading.in_use)
            self.made.append((loader, made))
            return made

        trainer.strategy.process_dataloader = process_dataloader  # type: ignore[method-assign]

    def _at(self, trainer: Trainer, done: int) -> None:
        if (trainer.current_epoch, done) == (self.epoch, self.done) and self.after is not None:
            for _, made in self.made:
                made.loading.use(self.after)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._at(trainer, 0)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self._at(trainer, index + 1)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        while self.made:
            self.made.pop()[1].loading.close()


def train(loaders: Any, *callbacks: Callback, folder: Path, validation: Any = None, **options: Any) -> Drawing:
    seed_everything(7, verbose=False)
    model = Drawing()
    trainer = quiet_trainer(
        folder, callbacks=list(callbacks), **{"max_epochs": 3, "num_sanity_val_steps": 0, **options}
    )
    with suppress(Boom):
        trainer.fit(model, loaders, validation)
    return model


def assert_equal(ours: Drawing, untouched: Drawing) -> None:
    assert ours.batches == untouched.batches
    assert ours.numbers == untouched.numbers
    assert ours.states == untouched.states
