"""The states of the global random generators, and the seeds of iterators and batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RandomStates = tuple[Any, Any, Any]

_MAX_NUMPY_SEED = 2**32
_MASK = 2**63 - 1
_GOLDEN = 0x1E3779B97F4A7C15  # odd, so that no two batches of a pass have the same seed: 2**64 / the golden ratio
# NumPy's global generator is exchanged for this one: reading and setting its state would take 130 us.
_numpy_bits = np.random.MT19937(0)
_numpy: Any = np.random  # NumPy's stubs lack the exchange


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


# Streams of their own for a loader's order and for each of its batches


def mixed(*parts: object) -> int:
    """Return a seed of 63 bits that is a function of all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def seed_of_batch(seed: int, number: int) -> int:
    """Return the seed of a batch. This is :func:`mixed` in a tenth of its time, for numbers of batches alone."""
    return (seed + number * _GOLDEN) & _MASK


def seed_all(seed: int) -> None:
    """Seed the global generators of torch (CPU), NumPy and Python."""
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which also seeds the GPUs
    np.random.seed(seed % _MAX_NUMPY_SEED)
    random.seed(seed)


def set_aside() -> tuple[Any, Any, Any]:
    """Return the states of the global generators, which :func:`seed_all` may then seed without losing them."""
    outside = torch.get_rng_state(), _numpy.get_bit_generator(), random.getstate()
    _numpy.set_bit_generator(_numpy_bits)
    return outside


def bring_back(outside: tuple[Any, Any, Any]) -> None:
    """Put back what :func:`set_aside` returned."""
    of_torch, of_numpy, of_python = outside
    torch.set_rng_state(of_torch)
    _numpy.set_bit_generator(of_numpy)
    random.setstate(of_python)


def drop_pending_number() -> None:
    """Drop the second number that NumPy has drawn with the last normal one, as :func:`set_aside` does."""
    _numpy.set_bit_generator(_numpy.get_bit_generator())


def packed_states(device: torch.device) -> list[Any]:
    """Return the states of the global generators, and of one GPU's, as types that ``weights_only=True`` loads."""
    of_torch, (name, keys, *rest), of_python = random_states()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return [of_torch, [name, torch.from_numpy(keys.astype(np.int64)), *rest], of_python, on_gpu]


def put_back_packed(states: list[Any], device: torch.device) -> None:
    """Set the generators to states of :func:`packed_states`."""
    of_torch, (name, keys, *rest), (version, numbers, pending), on_gpu = states
    put_back((of_torch, (name, keys.numpy().astype(np.uint32), *rest), (version, tuple(numbers), pending)))
    if on_gpu is not None and device.type == "cuda":
        torch.cuda.set_rng_state(on_gpu, device)
