"""Positions of a run's training loaders, and loaders that continue from there.

The order of a pass over a loader, the contents of each of its batches, and the step that trains on it draw random
numbers from streams of their own, which are functions of the seed of the run, the loader, the pass and the number of
the batch. So a position is two numbers, to skip k batches is to draw k batches of indices, no state of a global
generator has to be saved, and the number of workers does not matter.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from typing_extensions import override

from lightning_gpu_tools.loaders.held import GENERATORS, held_by, name_of, state_of, with_state
from lightning_gpu_tools.loaders.passes import ContinuedLoader, Indices, Loading, Pass, continued, seed_cpu
from lightning_gpu_tools.loaders.settings import GET_ITERATOR, sampler_of

_MASK = 2**63 - 1
_GOLDEN = 0x1E3779B97F4A7C15  # odd, so that no two batches of a pass have the same seed: 2**64 / the golden ratio


class Positions:
    """The training loaders of a run, and where each stands. ``step`` returns a number that tells validations apart."""

    def __init__(self, rank: int, step: Callable[[], int]) -> None:
        self.rank, self.step = rank, step
        self.seed = torch.initial_seed()  # ranks that are seeded alike have the same
        self.has_ended = False  # whether the epoch to resume has no more batches
        self.places: list[_Place] = []  # of the training loaders
        self._where: dict[int, _Position] = {}  # by number of the loader
        self._loadings: weakref.WeakSet[Loading] = weakref.WeakSet()

    def keep(self, loader: DataLoader[Any], is_training: bool) -> DataLoader[Any]:
        """Return a stand-in for this loader, whose position is kept."""
        made = continued(loader)
        if is_training and any(place.loading.has_begun for place in self.places):  # reload_dataloaders_every_n_epochs
            self.places = []
        place = _Place(made, len(self.places) if is_training else None)
        if is_training:
            self.places.append(place)
        self._loadings.add(made.loading)
        made.loading.new_pass = partial(SeededPass, positions=self, place=place)
        # With these, Lightning does not warn that the loader cannot be resumed. The positions are restored before the
        # loader exists.
        vars(made).update(state_dict=dict, load_state_dict=lambda state: None)
        return made

    def begin(self, place: _Place) -> tuple[int, int]:
        """Return the seed of the pass that begins, and the number of batches to skip."""
        if place.number is None:
            return mixed(self.seed, "validation", self.step()), 0
        position = self._where.get(place.number)
        if position is None or position.has_begun:
            position = _Position(0 if position is None else position.number + 1, 0, place.states())
        else:
            place.set_states(position.samplers)
        self._where[place.number] = position._replace(has_begun=True)
        place.delivered.clear()
        return mixed(self.seed, place.number, position.number), position.batches

    def batch_started(self) -> None:
        """Note that training has taken the next batch of each loader."""
        for number, place in enumerate(self.places):
            if place.delivered:
                self._where[number] = self._where[number]._replace(batches=place.delivered.popleft())

    def state_dict(self, *, is_last_batch: bool) -> dict[str, Any]:
        """Return the seed and the positions as plain data; after the last batch, those of the next pass."""
        where = dict(self._where)
        for number, place in enumerate(self.places if is_last_batch else []):
            if number in where and where[number].has_begun:
                where[number] = _Position(where[number].number + 1, 0, place.states())
        return {"seed": self.seed, "loaders": {number: list(position[:3]) for number, position in where.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these positions."""
        self.seed = state["seed"]
        self._where = {number: _Position(*position) for number, position in state["loaders"].items()}

    def close(self) -> None:
        """End all workers, and let the loaders iterate as before."""
        for loading in list(self._loadings):
            loading.close()


def is_resumable(loader: Any) -> bool:
    """Return whether a loader is a map-style DataLoader whose own way to iterate is torch's."""
    kind = type(loader)
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and kind.__iter__ in (DataLoader.__iter__, ContinuedLoader.__iter__)
        and getattr(kind, GET_ITERATOR, None) is getattr(DataLoader, GET_ITERATOR, None)
    )


def inexact(loader: Any) -> Iterator[str]:
    """Yield a sentence for each reason why this loader cannot continue exactly where it was."""
    if not is_resumable(loader):
        if not hasattr(loader, "state_dict"):
            yield (
                f"{name_of(getattr(loader, 'dataset', loader))} is iterated in a way of its own, and its loader has no "
                "state_dict, so a resumed epoch starts it over. torchdata's StatefulDataLoader continues with the same "
                "samples."
            )
        return
    if not loader.in_order:
        yield f"The batches of {name_of(loader.dataset)} come in any order (in_order=False). Remove that option."
    generators = [held.name for held in held_by(loader.dataset) if isinstance(held.thing, GENERATORS)]
    if generators:
        yield (
            f"{generators[0]} is a separate random generator, whose state is lost. Draw from the global generators: "
            "torch.rand, numpy.random, random."
        )


class _Position(NamedTuple):
    number: int  # of the pass
    batches: int  # given to training
    samplers: list[Any]  # their states when the pass began
    has_begun: bool = False


class _Place:
    """One loader, and what its passes have delivered."""

    def __init__(self, loader: ContinuedLoader, number: int | None) -> None:
        self.number = number  # None: for validation
        self.loading = loader.loading
        self.delivered: deque[int] = deque()  # numbers of batches that training has not taken yet
        found = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
        # Each once: the sampler of a batch sampler is that of the loader.
        each = {id(sampler): vars(sampler) for sampler in found if hasattr(sampler, "__dict__")}
        self._samplers = list(each.values())
        self._first = [dict(held) for held in self._samplers]

    def states(self) -> list[dict[str, Any]]:
        """Return what samplers may hold otherwise in another process: generators, numbers that changed, and seeds."""
        return [
            {name: state_of(value) for name, value in held.items() if _may_differ(name, value, first.get(name))}
            for held, first in zip(self._samplers, self._first, strict=True)
        ]

    def set_states(self, states: list[dict[str, Any]]) -> None:
        for held, saved in zip(self._samplers, states, strict=False):
            held.update((name, with_state(held.get(name), state)) for name, state in saved.items())


def _may_differ(name: str, value: Any, first: Any) -> bool:
    is_number = isinstance(value, (int, float))
    return isinstance(value, GENERATORS) or (is_number and (name == "seed" or value != first))


class _SeededIndex(tuple[int, Any]):
    """A seed and an index on their way to a worker, whose generators are seeded when they arrive there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (tuple(self),)


def _arrived(seeded: tuple[int, Any]) -> Any:
    seed_all(seeded[0])
    return seeded[1]


class SeededPass(Pass):
    """A pass whose order, batches and steps have random numbers of their own. It begins at its first ``next``.

    A plain DataLoader would ask the sampler for its order at once, and Lightning calls ``iter()`` before it restores a
    checkpoint, and before it tells a distributed sampler the epoch.
    """

    arrive = staticmethod(_arrived)

    def __init__(self, loader: ContinuedLoader, *, positions: Positions, place: _Place) -> None:
        self._positions, self._place = positions, place
        self._number: int | None = None  # of the next batch
        super().__init__(loader)

    @override
    def _start(self) -> Indices:
        return Indices(iter(()))

    @override
    def __next__(self) -> Any:
        is_training = self._place.number is not None
        if is_training and self._positions.has_ended:
            raise StopIteration
        if self._number is None:
            seed, self._number = self._positions.begin(self._place)
            self._of_steps, of_contents = mixed(seed, "steps"), mixed(seed, self._positions.rank)
            self.loading.seeds.manual_seed(of_contents)
            self.indices = Indices(_seeded(sampler_of(self.loader), mixed(seed, "order"), of_contents, self._number))
        try:
            batch = super().__next__()
        finally:
            seed_all(seed_of_batch(self._of_steps, self._number))
        self._number += 1
        if is_training:
            self._place.delivered.append(self._number)
        return batch


def _seeded(sampler: Any, of_order: int, of_contents: int, skip: int) -> Iterator[_SeededIndex]:
    """Yield what a sampler draws, from batch ``skip`` on, with a seed for each batch.

    The order and the steps have the same random numbers on all ranks that are seeded alike, the contents have not.
    """
    within = getattr(sampler, "sampler", None) if type(sampler) is BatchSampler else sampler
    # Torch's samplers draw from the global generators only before their first index.
    draws_late = not type(within).__module__.startswith("torch.utils.data.")
    seed_all(of_order)
    indices = iter(sampler)
    for number in itertools.count():
        if draws_late:
            seed_all(seed_of_batch(of_order, number + 1))
        try:
            index = next(indices)
        except StopIteration:
            return
        if number >= skip:
            yield _SeededIndex((seed_of_batch(of_contents, number), index))


# Seeds


def seed_all(seed: int) -> None:
    """Seed the global generators, also those of all GPUs. ``torch.manual_seed`` would take 250 us without a GPU."""
    seed_cpu(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def mixed(*parts: object) -> int:
    """Return a seed of 63 bits that is a function of all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def seed_of_batch(seed: int, number: int) -> int:
    """Return the seed of a batch. This is :func:`mixed` in a tenth of its time, for numbers of batches alone."""
    return (seed + number * _GOLDEN) & _MASK
