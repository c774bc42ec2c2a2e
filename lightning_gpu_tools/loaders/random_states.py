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


# States as types that `weights_only=True` loads


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def generator_state(generator: Any) -> Any:
    """Return the state of one of :data:`GENERATORS`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    return _plain(generator.get_state(legacy=False))


def set_generator_state(generator: Any, state: Any) -> None:
    """Set one of :data:`GENERATORS` to a state of :func:`generator_state`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, numbers, pending = state
        generator.setstate((version, tuple(numbers), pending))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _of_plain(state)
    else:
        generator.set_state(_of_plain(state))


def packed_states(device: torch.device) -> list[Any]:
    """Return the states of the global generators, and of one GPU's."""
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return [torch.get_rng_state(), _plain(np.random.get_state(legacy=False)), random.getstate(), on_gpu]


def put_back_packed(states: list[Any], device: torch.device) -> None:
    """Set the generators to states of :func:`packed_states`."""
    of_torch, of_numpy, (version, numbers, pending), on_gpu = states
    put_back((of_torch, _of_plain(of_numpy), (version, tuple(numbers), pending)))
    if on_gpu is not None and device.type == "cuda":
        torch.cuda.set_rng_state(on_gpu, device)


def _plain(state: Any) -> Any:
    """Return the state of a generator of NumPy with tensors for its arrays."""
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
