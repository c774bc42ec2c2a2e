"""The states of this process's global random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

RandomStates = tuple[Any, Any, Any]


def random_states() -> RandomStates:
    """Return the states of torch's (CPU), NumPy's and Python's global generators."""
    numpy = sys.modules.get("numpy")  # a program that has not imported it draws nothing from it
    return torch.get_rng_state(), None if numpy is None else numpy.random.get_state(), random.getstate()


def put_back(states: RandomStates) -> None:
    """Set the global generators to these states."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
    random.setstate(states[2])


def same_states(one: RandomStates, other: RandomStates) -> bool:
    """Return whether no global generator was drawn from between the two."""
    if not torch.equal(one[0], other[0]) or one[2] != other[2]:
        return False
    # If NumPy was imported in between, nobody has drawn from its generator before.
    return one[1] is None or other[1] is None or (one[1][2:] == other[1][2:] and (one[1][1] == other[1][1]).all())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put the global random states back when the block ends."""
    before = random_states()
    try:
        yield
    finally:
        put_back(before)


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw the seed of a new iterator like torch's DataLoader; ``None``: from the global generator."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def peek_seed(generator: torch.Generator | None) -> int:
    """Return what :func:`draw_seed` would return, without drawing it."""
    state = torch.get_rng_state() if generator is None else generator.get_state()
    return draw_seed(torch.Generator().set_state(state))


def seeded_states(seed: int) -> RandomStates:
    """Return the states of the global generators after seeding."""
    numpy = sys.modules.get("numpy")
    return (
        # Not torch.manual_seed, which also seeds the GPUs.
        torch.Generator().manual_seed(seed).get_state(),
        None if numpy is None else numpy.random.RandomState(seed % 2**32).get_state(),
        random.Random(seed).getstate(),
    )
