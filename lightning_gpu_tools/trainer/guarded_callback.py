"""A guard that keeps errors of this package from ending training."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_gpu_tools.loaders.workers import is_of_dead_worker
from lightning_gpu_tools.trainer.families import Callback
from lightning_gpu_tools.trainer.import_hooks import only_warn
from lightning_gpu_tools.units import printable


def warn_that_off(what: str, error: Exception) -> None:
    """Warn that ``what`` is off because of an error in it."""
    text = printable("".join(traceback.format_exception_only(error)).strip(), max_length=200)
    only_warn(f"{what}, because of an internal error: {text}")


class GuardedCallback(Callback):
    """A callback whose hooks turn their errors into warnings. While it is not on, only ``setup`` is called."""

    is_on = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, hook in list(vars(cls).items()):
            if callable(hook) and (name.startswith("on_") or name in ("setup", "teardown")):
                setattr(cls, name, _guarded(hook))

    def _give_up(self) -> None:
        """Do nothing more in this run."""

    def is_superfluous(self, callbacks: Sequence[Callback]) -> bool:
        """Return whether an earlier callback is of the same class, and warn: two would report everything twice."""
        same = [one for one in callbacks if type(one) is type(self) and not getattr(one, "yields", False)]
        if self in same[:1] or self not in same:
            return False
        name = type(self).__name__
        rank_zero_only(only_warn)(
            f"The Trainer has {len(same)} callbacks of type {name}, and only the first is active. Remove the others."
        )
        return True

    def survives(self, error: Exception) -> bool:
        """Give up after an error in a hook, unless the error is training's own."""
        if is_of_dead_worker(error):  # raised anywhere in the main thread
            return False
        self.turn_off(error)
        return True

    def turn_off(self, error: Exception) -> None:
        """Give up after an error, and warn."""
        with suppress(Exception):  # may fail for the same reason
            self._give_up()
        rank_zero_only(warn_that_off)(f"{type(self).__name__} is off for the rest of this run, without a report", error)


def _guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def guarded(self: GuardedCallback, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, *args, **kwargs) if self.is_on or hook.__name__ == "setup" else None
        except Exception as error:
            if not self.survives(error):
                raise
            return None

    return guarded
