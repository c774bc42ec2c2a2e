"""Keeps an error of what only measures from ending the training that it measures."""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_gpu_tools.loaders.workers import is_of_dead_worker
from lightning_gpu_tools.trainer.families import Callback
from lightning_gpu_tools.units import printable


class GuardedCallback(Callback):
    """A callback whose hooks turn each of their errors into a warning: the training has nothing to do with it.

    Attributes:
        intended: Errors that are meant for the user, and so end the training.
    """

    intended: ClassVar[tuple[type[Exception], ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, hook in list(vars(cls).items()):
            if callable(hook) and (name.startswith("on_") or name in ("setup", "teardown")):
                setattr(cls, name, _guarded(hook))

    def _give_up(self) -> None:
        """Do nothing more in this fit."""

    def turn_off(self, error: Exception) -> None:
        """Do nothing more in this fit, because of an error, and warn."""
        with suppress(Exception):  # what is broken may break here, too
            self._give_up()
        what = printable("".join(traceback.format_exception_only(error)).strip(), max_length=200)
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # no filter hides it, or turns it into an error of the training
            rank_zero_warn(
                f"{type(self).__name__} is off for the rest of this fit, without a report of it, because of an "
                f"error in it: {what}"
            )


def _guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def guarded(self: GuardedCallback, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, *args, **kwargs)
        except self.intended:
            raise
        except Exception as error:
            if is_of_dead_worker(error):  # which has nothing to do with what was done here
                raise
            self.turn_off(error)
            return None

    return guarded
