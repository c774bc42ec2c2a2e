"""Where the loaders of a training stand, and loaders that go on from there.

Three streams of random numbers are independent of each other: the order of a pass over a loader, the contents of each
of its batches, and everything else. The first two are functions of the seed of the run, the loader, the pass and the
number of the batch. So a position is two numbers, to skip k batches is to draw k batches of indices, and the number of
workers does not matter.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_gpu_tools.loaders.held import held_by, name_of
from lightning_gpu_tools.loaders.random_states import (
    bring_back,
    drop_pending_number,
    mixed,
    peek_seed,
    seed_all,
    seed_of_batch,
    set_aside,
)
from lightning_gpu_tools.loaders.settings import plain_loader, settings_of


class Positions:
    """The training loaders of a run, and where each stands.

    ``before_fetch`` is called before each training batch, ``step`` returns a number that tells validations apart.
    """

    def __init__(self, rank: int, before_fetch: Callable[[], None], step: Callable[[], int]) -> None:
        self.rank, self.before_fetch, self.step = rank, before_fetch, step
        self.seed = peek_seed(None)  # draws nothing
        self.loaders: list[ResumableLoader] = []
        self.has_ended = False  # whether the epoch to resume has no more batches
        self._where: dict[int, _Position] = {}  # by number of the loader: its next batch
        self._resumed: dict[int, _Position] = {}
        self._for_validation = 0

    def resumable(self, loader: DataLoader[Any], *, is_training: bool) -> ResumableLoader:
        """Return a loader like this one, whose position is kept."""
        if not is_training:
            self._for_validation += 1
            return ResumableLoader(loader, self, -self._for_validation)
        if any(known.has_begun for known in self.loaders):  # reload_dataloaders_every_n_epochs
            self.loaders = []
        made = ResumableLoader(loader, self, len(self.loaders))
        self.loaders.append(made)
        return made

    def begin(self, loader: ResumableLoader) -> tuple[int, int]:
        """Return the seed of the pass that begins, and the number of batches to skip."""
        number = loader.number
        if number < 0:
            return mixed(self.seed, "validation", number, self.step()), 0
        last = self._where.get(number)
        if number in self._resumed:
            position = self._resumed.pop(number)
            _set_states(loader, position.sampler)
        else:
            position = _Position(0 if last is None else last.number + 1, 0, _states(loader))
        self._where[number] = position
        loader.delivered.clear()
        return mixed(self.seed, number, position.number), position.batches

    def batch_started(self) -> None:
        """Note that training has taken the next batch of each loader."""
        for loader in self.loaders:
            if loader.delivered:
                self._where[loader.number] = self._where[loader.number]._replace(batches=loader.delivered.popleft())

    def state_dict(self, *, has_ended: bool) -> dict[str, Any]:
        """Return the seed and the positions as plain data; ``has_ended``: the next batch is of the next pass."""
        where = {**self._where, **self._resumed}
        if has_ended and not self._resumed:
            for loader in self.loaders:
                if (last := where.get(loader.number)) is not None:
                    where[loader.number] = _Position(last.number + 1, 0, _states(loader))
        return {"seed": self.seed, "loaders": {number: list(position) for number, position in where.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these positions."""
        self.seed = state["seed"]
        self._resumed = {number: _Position(*position) for number, position in state["loaders"].items()}
        self._where = dict(self._resumed)

    def close(self) -> None:
        """End persistent workers."""
        for loader in self.loaders:
            loader.inner = None


def is_resumable(loader: Any) -> bool:
    """Return whether a loader is a DataLoader whose own way to iterate is torch's."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def inexact(loader: Any) -> Iterator[str]:
    """Yield a sentence for each reason why this loader cannot go on exactly where it was."""
    kind = type(getattr(loader, "original", loader)).__name__
    if not isinstance(loader, ResumableLoader):
        if not hasattr(loader, "state_dict"):
            yield f"{kind} is no plain DataLoader and has no state_dict, so a resumed epoch begins it again."
        return
    dataset = name_of(loader.dataset)
    if isinstance(loader.dataset, IterableDataset):
        yield (
            f"{dataset} is iterable, so resuming reads and drops the batches that were seen, with the same number of "
            "workers. torchdata's StatefulDataLoader goes on at once."
        )
    elif not loader.in_order:
        yield f"The batches of {dataset} come in any order (in_order=False). Remove that option."
    generators = [held.name for held in held_by(loader.dataset) if isinstance(held.thing, _GENERATORS)]
    if generators:
        yield (
            f"{generators[0]} is a random generator of its own, whose state is lost. Draw from the global generators: "
            "torch.rand, numpy.random, random."
        )


class _Position(NamedTuple):
    number: int  # of the pass
    batches: int  # given to training
    sampler: list[Any]  # what its samplers held when the pass began, see `_states`


class ResumableLoader(DataLoader[Any]):
    """A stand-in for a DataLoader, with its attributes. Each ``iter()`` is a pass, which begins at its first ``next``.

    A plain DataLoader would ask the sampler for its order at once, and Lightning calls ``iter()`` before it restores a
    checkpoint, and before it tells a distributed sampler the epoch.
    """

    def __init__(self, loader: DataLoader[Any], positions: Positions, number: int) -> None:
        vars(self).update(vars(loader))
        vars(self).update(
            original=loader,
            positions=positions,
            number=number,  # below 0: for validation
            inner=None,
            numbers=_numbers(loader),  # of its samplers, at the start
            has_begun=False,
            delivered=deque(),  # numbers of batches that training has not taken yet
        )

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)

    def __len__(self) -> int:
        return len(self.original)

    def __iter__(self) -> Any:
        vars(self)["has_begun"] = True
        return _Pass(self)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: with this method, Lightning does not warn that the loader cannot be resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the positions are restored before the loader exists."""

    def inner_loader(self, seed: int, skip: int) -> Any:
        """Return a plain DataLoader for the rest of a pass, with the workers of the last pass if they persist."""
        is_stream = isinstance(self.dataset, IterableDataset)
        if self.inner is None or is_stream:  # the workers of a stream go on where they are, so each pass has new ones
            indices = None if is_stream else _Indices(self)
            generator = torch.Generator()
            vars(self)["inner"] = plain_loader(self, settings_of(self), indices, generator=generator)
        inner = self.inner
        inner.generator.manual_seed(mixed(seed, self.positions.rank))
        if not is_stream:
            source = inner.sampler if inner.batch_sampler is None else inner.batch_sampler
            source.seed, source.skip = seed, skip
        return inner


class _Pass:
    """The iterator of one pass."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader
        self._batches: Any = None  # torch's iterator
        self._seed = self._number = 0

    def __iter__(self) -> _Pass:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)  # other code looks for workers on torch's iterator

    def __next__(self) -> Any:
        loader, positions = self._loader, self._loader.positions
        is_training = loader.number >= 0
        if is_training:
            if positions.has_ended:
                raise StopIteration
            positions.before_fetch()
        if self._batches is None:
            self._begin(*positions.begin(loader))
        batch = self._fetch()
        self._number += 1
        if is_training:
            loader.delivered.append(self._number)
        return batch

    def _begin(self, seed: int, skip: int) -> None:
        loader = self._loader
        self._seed = mixed(seed, loader.positions.rank)
        inner = loader.inner_loader(seed, skip)
        outside = set_aside()
        try:
            seed_all(self._seed)
            self._batches = iter(inner)
        finally:
            bring_back(outside)
        if isinstance(loader.dataset, IterableDataset):
            while self._number < skip:  # can only be read and dropped
                self._fetch()
                self._number += 1
        self._number = skip

    def _fetch(self) -> Any:
        loader = self._loader
        if loader.num_workers:
            drop_pending_number()  # so that the number of workers makes no difference
            return next(self._batches)
        outside = set_aside()
        try:
            if isinstance(loader.dataset, IterableDataset):
                seed_all(seed_of_batch(self._seed, self._number))
            return next(self._batches)
        finally:
            bring_back(outside)


class _Indices:
    """The batch sampler of a plain loader: what the user's draws, from batch ``skip`` on, with a seed for each batch.

    The order is common to all ranks, and the contents of batches are not.
    """

    def __init__(self, loader: ResumableLoader) -> None:
        self.seed = self.skip = 0
        self._sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._rank = loader.positions.rank
        self._in_process = not loader.num_workers
        within = getattr(self._sampler, "sampler", None) if type(self._sampler) is BatchSampler else self._sampler
        # Torch's samplers draw from the global generators only before their first index.
        self._draws_late = not type(within).__module__.startswith("torch.utils.data.")

    def __iter__(self) -> Iterator[Any]:
        skip, of_order, of_contents = self.skip, mixed(self.seed, "order"), mixed(self.seed, self._rank)
        indices = None
        for number in itertools.count():
            draws = self._draws_late or indices is None
            outside = set_aside() if draws and not self._in_process else None  # in the process, the pass does that
            try:
                if draws:
                    seed_all(seed_of_batch(of_order, number))
                indices = iter(self._sampler) if indices is None else indices
                index = next(indices)
            except StopIteration:
                return
            finally:
                if outside is not None:
                    bring_back(outside)
            if number < skip:
                continue
            seed = seed_of_batch(of_contents, number)
            if self._in_process:
                seed_all(seed)
                yield index
            else:
                yield _SeededIndex(seed, index)


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


def _samplers(loader: Any) -> list[Any]:
    found = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return [sampler for sampler in found if hasattr(sampler, "__dict__")]


def _numbers(loader: Any) -> list[dict[str, Any]]:
    """Return the numbers in the attributes of each sampler: a count of epochs, for example."""
    samplers = map(vars, _samplers(loader))
    return [{name: value for name, value in held.items() if isinstance(value, (int, float))} for held in samplers]


def _states(loader: ResumableLoader) -> list[Any]:
    """Return what may be otherwise in another process: states of generators, numbers that have changed, and seeds."""
    changed = [
        {name: value for name, value in now.items() if name == "seed" or value != first.get(name)}
        for now, first in zip(_numbers(loader), loader.numbers, strict=False)
    ]
    return [changed, [_state(generator) for generator in _generators(loader)]]


def _set_states(loader: ResumableLoader, states: list[Any]) -> None:
    changed, of_generators = states
    for sampler, numbers in zip(_samplers(loader), changed, strict=False):
        vars(sampler).update(numbers)
    for generator, state in zip(_generators(loader), of_generators, strict=False):
        _set_state(generator, state)


def _generators(loader: ResumableLoader) -> list[Any]:
    """Return the generators in the attributes of the samplers, each once; they go on from pass to pass."""
    values = [value for sampler in _samplers(loader) for value in vars(sampler).values()]
    found = [value for value in values if isinstance(value, _GENERATORS)]
    return list({id(generator): generator for generator in found}.values())


_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    return _plain(generator.get_state(legacy=False))


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, numbers, pending = state
        generator.setstate((version, tuple(numbers), pending))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _of_plain(state)
    else:
        generator.set_state(_of_plain(state))


def _plain(state: Any) -> Any:
    """Return the state of a generator of NumPy with tensors for its arrays, which ``weights_only=True`` loads."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    if isinstance(state, np.ndarray):
        return [str(state.dtype), torch.from_numpy(state.astype(np.int64))]
    return state


def _of_plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _of_plain(value) for name, value in state.items()}
    if isinstance(state, list):
        dtype, values = state
        return values.numpy().astype(dtype)
    return state
