"""Which samples come next: drawn from the user's own sampler, at the moments at which the user's settings draw."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lightning_gpu_tools.loaders.random_state import random_state


def length_of(sized: Any) -> int | None:
    """Return how many a sampler or a loader has; ``None`` if it does not tell."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


class IndexSource:
    """One epoch's indices (or lists of indices), handed out in order to whoever loads them.

    Loaders with more workers draw from the sampler further ahead. A sampler may draw random numbers at its first index,
    at its end, or as it goes, so when it is asked decides what it answers. Therefore it is asked at the latest when the
    user's own settings would have asked. Further ahead it is asked only for what the epoch certainly needs, and
    ``draws_as_it_goes`` says whether that was innocent.

    Args:
        indices: The iterator of the user's sampler.
        ahead: How many indices the user's own settings draw ahead; 0 = none, each when its batch is asked for.
        length: How many indices the epoch needs; ``None`` if that is unknown. It may turn out to be more.
        generators: Random generators that the sampler may draw from, besides the global ones.
        watch: Whether to find out if the sampler draws as it goes, at some 30 us an index.

    Attributes:
        draws_as_it_goes: Whether an index other than the first was seen to change the state of a random generator.
    """

    def __init__(
        self,
        indices: Iterator[Any],
        *,
        ahead: int,
        length: int | None,
        generators: Iterable[torch.Generator] = (),
        watch: bool = False,
    ) -> None:
        self.draws_as_it_goes = False
        self._indices = indices
        self._ahead = ahead
        self.length = length
        self._generators = tuple(generators)
        self._watch = watch
        self._ready: deque[Any] = deque()
        self._asked = self._drawn = 0
        self._ended = False

    @property
    def has_ready(self) -> bool:
        """Whether an index is drawn that nobody has taken."""
        return bool(self._ready)

    @property
    def finished(self) -> bool:
        """Whether the epoch has asked for all it needs. A Trainer does not ask once more to hear that it is the end."""
        return self._ended or (self.length is not None and self._asked >= self.length)

    def begin(self) -> None:
        """Say that a batch is asked for."""
        self._asked += 1
        if not self._ahead:
            self._draw_what_is_due()

    def end(self) -> None:
        """Say that it has been delivered; once before the first one, that the workers are up."""
        if self._ahead:
            self._draw_what_is_due()

    def take(self) -> Any:
        """Return the next index.

        Raises:
            StopIteration: The epoch needs no more, or the sampler has no more.
        """
        if self._ready:
            return self._ready.popleft()
        needed = self.length is None or self._drawn < self.length
        if self._ended or not (needed or self._is_due):
            raise StopIteration
        return self._draw()

    def put_back(self, indices: Iterable[Any]) -> None:
        """Take back, to the front, what was handed out and not loaded."""
        self._ready.extendleft(reversed(list(indices)))

    @property
    def _is_due(self) -> bool:
        return self._drawn < self._ahead + self._asked

    def _draw_what_is_due(self) -> None:
        with contextlib.suppress(StopIteration):
            while self._is_due and not self._ended:
                self._ready.append(self._draw())

    def _draw(self) -> Any:
        watched = self._watch and self._drawn > 0 and not self.draws_as_it_goes
        before = random_state(self._generators) if watched else None
        try:
            index = next(self._indices)
        except StopIteration:
            self._ended = True
            raise
        self._drawn += 1
        if watched:
            self.draws_as_it_goes = random_state(self._generators) != before
        return index
