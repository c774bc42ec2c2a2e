"""The states of the global random generators, and the seeds of iterators and batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_MAX_NUMPY_SEED = 2**32
_MASK = 2**63 - 1
_GOLDEN = 0x1E3779B97F4A7C15  # odd, so that no two batches of a pass have the same seed: 2**64 / the golden ratio


def random_states() -> tuple[Any, Any, Any]:
    """Return the states of torch's (CPU), NumPy's and Python's global generators."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the global random states when the block ends."""
    of_torch, of_numpy, of_python = random_states()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw the seed of a new iterator like torch's DataLoader; ``None`` means the global generator."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def seed_cpu(seed: int) -> None:
    """Seed the global generators of torch (CPU), NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % _MAX_NUMPY_SEED)
    random.seed(seed)


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


def state_of(thing: Any) -> Any:
    """Return the state of one of :data:`GENERATORS`, in types that ``weights_only=True`` reads, or anything else."""
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, random.Random):
        return thing.getstate()
    if isinstance(thing, np.random.Generator):
        return state_of(thing.bit_generator.state)
    if isinstance(thing, np.random.RandomState):
        return state_of(thing.get_state(legacy=False))
    if isinstance(thing, dict):  # a state of NumPy, which takes lists for its arrays
        return {name: state_of(value) for name, value in thing.items()}
    return thing.tolist() if isinstance(thing, np.ndarray) else thing


def with_state(thing: Any, state: Any) -> Any:
    """Set one of :data:`GENERATORS` to a state of :func:`state_of`, and return it; return anything else's state."""
    if isinstance(thing, random.Random):
        thing.setstate(state)
    elif isinstance(thing, np.random.Generator):
        thing.bit_generator.state = state
    elif isinstance(thing, (torch.Generator, np.random.RandomState)):
        thing.set_state(state)
    return thing if isinstance(thing, GENERATORS) else state
