"""The states of the global random generators, and the seeds that torch's DataLoader draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RandomStates = tuple[Any, Any, Any]


def random_states() -> RandomStates:
    """Return the states of torch's (CPU), NumPy's and Python's global generators."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def put_back(states: RandomStates) -> None:
    """Set the global generators to these states."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def same_states(one: RandomStates, other: RandomStates) -> bool:
    """Return whether no global generator was used between the two states."""
    _, keys, *place = one[1]
    _, other_keys, *other_place = other[1]
    same_numpy = place == other_place and np.array_equal(keys, other_keys)
    return same_numpy and one[2] == other[2] and torch.equal(one[0], other[0])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the global random states when the block ends."""
    before = random_states()
    try:
        yield
    finally:
        put_back(before)


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw the seed of a new iterator like torch's DataLoader; ``None`` means the global generator."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def peek_seed(generator: torch.Generator | None) -> int:
    """Return the seed that :func:`draw_seed` would draw, without drawing it."""
    state = torch.get_rng_state() if generator is None else generator.get_state()
    return draw_seed(torch.Generator().set_state(state))


def seeded_states(seed: int) -> RandomStates:
    """Return the states of the global generators after seeding."""
    return (
        # Not torch.manual_seed, which also seeds the GPUs.
        torch.Generator().manual_seed(seed).get_state(),
        np.random.RandomState(seed % 2**32).get_state(),
        random.Random(seed).getstate(),
    )
