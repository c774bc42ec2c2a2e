"""The random numbers of this process: kept as the user's own program would have left them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def random_state(generators: Iterable[torch.Generator] = ()) -> tuple[Any, ...]:
    """Return the state of torch's (CPU), NumPy's and Python's global generators and of those given; compare with ==."""
    torch_state, numpy_state, python_state = _take()
    return (
        torch_state.numpy().tobytes(),
        None if numpy_state is None else (numpy_state[1].tobytes(), *numpy_state[2:]),
        python_state,
        *(generator.get_state().numpy().tobytes() for generator in generators),
    )


class PrivateRandomness:
    """Global random numbers of its own: inside of ``with``, and nowhere else, they go on from where they stood.

    Args:
        seed: Where they start.
    """

    def __init__(self, seed: int) -> None:
        numpy = sys.modules.get("numpy")
        self._state = (
            # Not torch.manual_seed, which would seed the GPUs, too.
            torch.Generator().manual_seed(seed).get_state(),
            None if numpy is None else numpy.random.RandomState(seed % 2**32).get_state(),
            random.Random(seed).getstate(),
        )

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Use them for the time of a block."""
        outside = _take()
        _put(self._state)
        try:
            yield
        finally:
            self._state = _take()
            _put(outside)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put the random numbers back to where they stood when the block ends."""
    before = _take()
    try:
        yield
    finally:
        _put(before)


def _take() -> tuple[Any, Any, Any]:
    numpy = sys.modules.get("numpy")  # who has not imported it draws nothing from it
    return torch.get_rng_state(), None if numpy is None else numpy.random.get_state(), random.getstate()


def _put(state: tuple[Any, Any, Any]) -> None:
    torch_state, numpy_state, python_state = state
    torch.set_rng_state(torch_state)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)
    random.setstate(python_state)
