"""How long a Trainer waits for a loader whose settings are not ours to change."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from lightning.pytorch import Trainer


class FetchWaits:
    """Adds up the waits of the training loop for its batches, from now until it is closed."""

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop.epoch_loop
        self._wait_s = 0.0
        self._began_s = self._since_s = time.perf_counter()
        self._ended_s: float | None = None
        # The loop looks both up on itself at the start of each epoch.
        self._loop._on_before_fetch = functools.partial(  # type: ignore[method-assign]
            self._before, self._loop._on_before_fetch
        )
        self._loop._on_after_fetch = functools.partial(  # type: ignore[method-assign]
            self._after, self._loop._on_after_fetch
        )

    @property
    def share(self) -> float:
        """The part of the time that went into the waits."""
        until_s = time.perf_counter() if self._ended_s is None else self._ended_s
        return self._wait_s / max(1e-9, until_s - self._began_s)

    def _before(self, inner: Callable[[], None]) -> None:
        inner()
        self._since_s = time.perf_counter()

    def _after(self, inner: Callable[[], None]) -> None:
        self._wait_s += time.perf_counter() - self._since_s
        inner()

    def close(self) -> None:
        """Stop, and leave the loop as it was."""
        self._ended_s = time.perf_counter()
        for name in ("_on_before_fetch", "_on_after_fetch"):
            self._loop.__dict__.pop(name, None)
