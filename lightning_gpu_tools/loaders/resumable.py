"""Positions of a run's training loaders, and loaders that continue from there.

Three streams of random numbers are independent of each other: the order of a pass over a loader, the contents of each
of its batches, and everything else. The first two are functions of the seed of the run, the loader, the pass and the
number of the batch. So a position is two numbers, to skip k batches is to draw k batches of indices, and the number of
workers does not matter.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from typing_extensions import override

from lightning_gpu_tools.loaders.held import held_by, name_of
from lightning_gpu_tools.loaders.passes import ContinuedLoader, Indices, Loading, Pass, continued
from lightning_gpu_tools.loaders.random_states import (
    GENERATORS,
    bring_back,
    drop_pending_number,
    generator_state,
    mixed,
    peek_seed,
    seed_all,
    seed_of_batch,
    set_aside,
    set_generator_state,
)
from lightning_gpu_tools.loaders.settings import GET_ITERATOR, sampler_of


class Positions:
    """The training loaders of a run, and where each stands.

    ``before_fetch`` is called before each training batch, ``step`` returns a number that tells validations apart.
    """

    def __init__(self, rank: int, before_fetch: Callable[[], None], step: Callable[[], int]) -> None:
        self.rank, self.before_fetch, self.step = rank, before_fetch, step
        self.seed = peek_seed(None)  # draws nothing
        self.has_ended = False  # whether the epoch to resume has no more batches
        self._places: list[_Place] = []  # of the training loaders
        self._for_validation = 0  # the number of loaders since the last validation
        self._loadings: weakref.WeakSet[Loading] = weakref.WeakSet()
        self._where: dict[int, _Position] = {}  # by number of the loader: its next batch
        self._resumed: dict[int, _Position] = {}

    def keep(self, loader: DataLoader[Any], *, is_training: bool) -> DataLoader[Any]:
        """Return a stand-in for this loader, whose position is kept."""
        made = continued(loader)
        if is_training and any(place.loading.has_begun for place in self._places):  # reload_dataloaders_every_n_epochs
            self._places = []
        if is_training:
            place = _Place(made, len(self._places))
            self._places.append(place)
        else:
            self._for_validation += 1
            place = _Place(made, -self._for_validation)
        self._loadings.add(made.loading)
        made.loading.new_pass = partial(SeededPass, positions=self, place=place)
        # With these, Lightning does not warn that the loader cannot be resumed. The positions are restored before the
        # loader exists.
        vars(made).update(state_dict=dict, load_state_dict=_ignore)
        return made

    def begin(self, place: _Place) -> tuple[int, int]:
        """Return the seed of the pass that begins, and the number of batches to skip."""
        number = place.number
        if number < 0:
            self._for_validation = 0
            return mixed(self.seed, "validation", number, self.step()), 0
        last = self._where.get(number)
        if number in self._resumed:
            position = self._resumed.pop(number)
            _set_states(place, position.sampler)
        else:
            position = _Position(0 if last is None else last.number + 1, 0, _states(place))
        self._where[number] = position
        place.delivered.clear()
        return mixed(self.seed, number, position.number), position.batches

    def batch_started(self) -> None:
        """Note that training has taken the next batch of each loader."""
        for place in self._places:
            if place.delivered:
                self._where[place.number] = self._where[place.number]._replace(batches=place.delivered.popleft())

    def state_dict(self, *, has_ended: bool) -> dict[str, Any]:
        """Return the seed and the positions as plain data; ``has_ended``: the next batch is of the next pass."""
        where = {**self._where, **self._resumed}
        if has_ended and not self._resumed:
            for place in self._places:
                if (last := where.get(place.number)) is not None:
                    where[place.number] = _Position(last.number + 1, 0, _states(place))
        return {"seed": self.seed, "loaders": {number: list(position) for number, position in where.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these positions."""
        self.seed = state["seed"]
        self._resumed = {number: _Position(*position) for number, position in state["loaders"].items()}
        self._where = dict(self._resumed)

    def close(self) -> None:
        """End all workers, and let the loaders iterate as before."""
        for loading in list(self._loadings):
            loading.close()


def _ignore(state: dict[str, Any]) -> None:
    pass


def is_resumable(loader: Any) -> bool:
    """Return whether a loader is a DataLoader whose own way to iterate is torch's."""
    kind = type(loader)
    return (
        isinstance(loader, DataLoader)
        and kind.__iter__ in (DataLoader.__iter__, ContinuedLoader.__iter__)
        and getattr(kind, GET_ITERATOR, None) is getattr(DataLoader, GET_ITERATOR, None)
    )


def inexact(loader: Any) -> Iterator[str]:
    """Yield a sentence for each reason why this loader cannot continue exactly where it was."""
    if not isinstance(loader, ContinuedLoader) or not is_resumable(loader):
        if not hasattr(loader, "state_dict"):
            kind = type(loader).__name__
            yield f"{kind} is not a plain DataLoader and has no state_dict, so a resumed epoch starts it over."
        return
    dataset = name_of(loader.dataset)
    if isinstance(loader.dataset, IterableDataset):
        yield (
            f"{dataset} is iterable, so resuming reads and drops the batches that were seen, with the same number of "
            "workers. torchdata's StatefulDataLoader continues at once."
        )
    elif not loader.in_order:
        yield f"The batches of {dataset} come in any order (in_order=False). Remove that option."
    generators = [held.name for held in held_by(loader.dataset) if isinstance(held.thing, GENERATORS)]
    if generators:
        yield (
            f"{generators[0]} is a separate random generator, whose state is lost. Draw from the global generators: "
            "torch.rand, numpy.random, random."
        )


class _Position(NamedTuple):
    number: int  # of the pass
    batches: int  # given to training
    sampler: list[Any]  # what its samplers held when the pass began, see `_states`


class _Place:
    """One loader, and what its passes have delivered."""

    def __init__(self, loader: ContinuedLoader, number: int) -> None:
        self.number = number  # below 0: for validation
        self.loading = loader.loading
        within = getattr(loader.batch_sampler, "sampler", None)
        found = [loader.sampler, loader.batch_sampler, within]
        self.samplers = [sampler for sampler in found if hasattr(sampler, "__dict__")]
        self.numbers = _numbers(self)  # at the start
        self.delivered: deque[int] = deque()  # numbers of batches that training has not taken yet


class SeededPass(Pass):
    """A pass whose order and batches have random numbers of their own. It begins at its first ``next``.

    A plain DataLoader would ask the sampler for its order at once, and Lightning calls ``iter()`` before it restores a
    checkpoint, and before it tells a distributed sampler the epoch.
    """

    def __init__(self, loader: ContinuedLoader, *, positions: Positions, place: _Place) -> None:
        super().__init__(loader)
        self._positions, self._place = positions, place
        self._has_begun = False
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._seed = self._number = 0
        self.loading.has_begun = True

    @override
    @staticmethod
    def arrive(index: Any) -> Any:
        return _arrived(*index)

    def __next__(self) -> Any:
        positions, place = self._positions, self._place
        if place.number >= 0:
            if positions.has_ended:
                raise StopIteration
            positions.before_fetch()
        if not self._has_begun:
            self._begin()
        batch = super().__next__()
        self._number += 1
        if place.number >= 0:
            place.delivered.append(self._number)
        return batch

    def _begin(self) -> None:
        seed, skip = self._positions.begin(self._place)
        self._has_begun = True
        self._seed = mixed(seed, self._positions.rank)
        self.loading.seeds.manual_seed(self._seed)
        if not self._is_stream:
            self.indices = Indices(_seeded(sampler_of(self.loader), mixed(seed, "order"), self._seed, skip))
            self.indices.start()
        while self._is_stream and self._number < skip:  # can only be read and dropped
            super().__next__()
            self._number += 1
        self._number = skip

    @override
    def load(self, generator: torch.Generator | None, *, starts: bool = False) -> None:
        outside = set_aside()
        try:
            seed_all(self._seed)
            super().load(generator, starts=starts)
        finally:
            bring_back(outside)

    @override
    def fetch(self) -> Any:
        assert self.batches is not None
        if self.settings.num_workers:
            drop_pending_number()  # so that the number of workers makes no difference
            return next(self.batches)
        outside = set_aside()
        try:
            if self._is_stream:
                seed_all(seed_of_batch(self._seed, self._number))
            return next(self.batches)
        finally:
            bring_back(outside)


def _seeded(sampler: Any, of_order: int, of_contents: int, skip: int) -> Iterator[_SeededIndex]:
    """Yield what a sampler draws, from batch ``skip`` on, with a seed for each batch.

    The order is common to all ranks, and the contents of batches are not.
    """
    within = getattr(sampler, "sampler", None) if type(sampler) is BatchSampler else sampler
    # Torch's samplers draw from the global generators only before their first index.
    draws_late = not type(within).__module__.startswith("torch.utils.data.")
    indices = None
    for number in itertools.count():
        draws = draws_late or indices is None
        outside = set_aside() if draws else None
        try:
            if draws:
                seed_all(seed_of_batch(of_order, number))
            indices = iter(sampler) if indices is None else indices
            index = next(indices)
        except StopIteration:
            return
        finally:
            if outside is not None:
                bring_back(outside)
        if number >= skip:
            yield _SeededIndex(seed_of_batch(of_contents, number), index)


class _SeededIndex(NamedTuple):
    """An index on its way to a worker, whose generators are seeded when it arrives there."""

    seed: int
    index: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.seed, self.index)


def _arrived(seed: int, index: Any) -> Any:
    seed_all(seed)
    return index


# What samplers hold


def _numbers(place: _Place) -> list[dict[str, Any]]:
    """Return the numbers in the attributes of each sampler: a count of epochs, for example."""
    samplers = map(vars, place.samplers)
    return [{name: value for name, value in held.items() if isinstance(value, (int, float))} for held in samplers]


def _states(place: _Place) -> list[Any]:
    """Return what may be otherwise in another process: states of generators, numbers that have changed, and seeds."""
    changed = [
        {name: value for name, value in now.items() if name == "seed" or value != first.get(name)}
        for now, first in zip(_numbers(place), place.numbers, strict=False)
    ]
    return [changed, [generator_state(generator) for generator in _generators(place)]]


def _set_states(place: _Place, states: list[Any]) -> None:
    changed, of_generators = states
    for sampler, numbers in zip(place.samplers, changed, strict=False):
        vars(sampler).update(numbers)
    for generator, state in zip(_generators(place), of_generators, strict=False):
        set_generator_state(generator, state)


def _generators(place: _Place) -> list[Any]:
    """Return the generators in the attributes of the samplers, each once; they go on from pass to pass."""
    values = [value for sampler in place.samplers for value in vars(sampler).values()]
    found = [value for value in values if isinstance(value, GENERATORS)]
    return list({id(generator): generator for generator in found}.values())
