"""Keeps a fault of a callback that only measures from ending the training that it measures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn


class _Measuring(Protocol):
    def _give_up(self, trainer: Trainer) -> None:
        """Measure no more in this fit."""


def never_stops_training(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook of a callback with faults in it turned into a warning; nothing more is measured in this fit."""

    @functools.wraps(hook)
    def guarded(self: _Measuring, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, trainer, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training has nothing to do with it
            self._give_up(trainer)
            rank_zero_warn(f"{type(self).__name__} measures no more, because of a fault in it: {error!r}")

    return guarded
