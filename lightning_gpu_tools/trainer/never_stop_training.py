"""Keeps an error of what only measures from ending the training that it measures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn


class _Measuring(Protocol):
    def _give_up(self) -> None:
        """Measure no more in this fit."""


def never_stops_training(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook of a callback with errors in it turned into a warning; nothing more is measured in this fit."""

    @functools.wraps(hook)
    def safe(self: _Measuring, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, trainer, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training has nothing to do with it
            with suppress(Exception):  # what is broken may break here, too
                self._give_up()
            rank_zero_warn(
                f"{type(self).__name__} is off for the rest of this fit, without a report of it, because of an error "
                f"in it: {error!r}"
            )

    return safe
