"""Keeps a fault of what only measures from ending the training that it measures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn


class _Measuring(Protocol):
    def _give_up(self) -> None:
        """Measure no more in this fit."""


def never_stops_training(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook of a callback with faults in it turned into a warning; nothing more is measured in this fit."""

    @functools.wraps(hook)
    def safe(self: _Measuring, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, trainer, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training has nothing to do with it
            guarded(self._give_up)
            _warn(type(self).__name__, error)

    return safe


def guarded(action: Callable[[], object]) -> None:
    """Do something outside of a hook, with a fault in it turned into a warning."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - as above
        _warn("lightning_gpu_tools", error)


def _warn(who: str, error: Exception) -> None:
    rank_zero_warn(
        f"{who} is off for the rest of this fit, without a report of it, because of an error in it: {error!r}"
    )
