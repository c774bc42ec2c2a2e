"""Times what the Trainer does by the names that it tells its profiler, each action under the phase that it belongs to.

Lightning puts every hook, the training step and the fetch of a batch between ``profiler.start(name)`` and
``profiler.stop(name)``, also when nobody profiles: then its ``PassThroughProfiler`` makes a generator for each of some
thirty actions a step to do nothing. Here that costs a look into a table, which is why a training that is timed is not
slower than one that is not. A profiler of the user's goes on as before, within the times taken here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lightning_gpu_tools.trainer.wrappers import StandIn, Wrappers
from lightning_gpu_tools.training.phases import (
    CALLBACK,
    HOST_TO_DEVICE_COPY,
    LOGGING,
    MONITORING,
    TRAINING_STEP,
    VALIDATION,
)
from lightning_gpu_tools.training.stopwatch import Stopwatch

# Lightning's name for forward, backward and optimizer.
RUN_STEP = "run_training_batch"
# Those of validation but the last are part of the phase "validation".
_TIMED_HOOKS = frozenset(
    {
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_train_epoch_end",
        "on_validation_end",
        "on_train_end",
    }
)
_TRANSFER_HOOKS = frozenset({"on_before_batch_transfer", "on_after_batch_transfer"})
# A choice: a user's own actions may have a number in their names, and are not kept without end.
_MOST_CONTEXTS = 1000

_Context = AbstractContextManager[Any]


class _Contexts(dict[str, _Context]):
    """The context of each action, made when it is asked for."""

    def __init__(self, make: Callable[[str], _Context]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, action: str) -> _Context:
        try:
            context = self._make(action)
        except Exception:  # noqa: BLE001 - a callback that is unlike any other: it is not timed, and training goes on
            context = nullcontext(action)
        if len(self) < _MOST_CONTEXTS:
            self[action] = context
        return context


class _Profile(StandIn):
    """In the place of ``PassThroughProfiler.profile``, which does nothing but at a price."""

    def __init__(self, profiler: Profiler, contexts: _Contexts) -> None:
        super().__init__(profiler, "profile")
        self.contexts = contexts

    def __call__(self, action_name: str) -> _Context:
        return self.contexts[action_name]


def time_actions(
    trainer: Trainer,
    wrappers: Wrappers,
    *,
    context: Callable[[str], _Context],
    begin: Callable[[str], None],
    end: Callable[[str], None],
) -> None:
    """Put contexts around the Trainer's actions.

    Args:
        trainer: Whose actions.
        wrappers: What takes them off again.
        context: Returns the context of an action. It is asked once for each name, so it must be usable again and again.
        begin: Called when an action begins for which Lightning uses no context: the fetch of a batch.
        end: Called when such an action ends.
    """
    profiler, contexts = trainer.profiler, _Contexts(context)  # type: ignore[attr-defined]
    if type(profiler) is PassThroughProfiler:
        wrappers.put(profiler, "profile", lambda profile: _Profile(profiler, contexts))
    else:
        wrappers.put(profiler, "profile", lambda profile: _around(profile, contexts))
    wrappers.put(profiler, "start", lambda start: _one_then_other(begin, start))
    wrappers.put(profiler, "stop", lambda stop: _one_then_other(stop, end))


# The parameters of these are called as in Lightning, so that they can be given by name.


def _around(profile: Callable[[str], _Context], contexts: Mapping[str, _Context]) -> Callable[[str], _Context]:
    @contextmanager
    def both(action_name: str) -> Iterator[Any]:
        with contexts[action_name], profile(action_name) as given:
            yield given

    return both


def _one_then_other(one: Callable[[str], None], other: Callable[[str], None]) -> Callable[[str], None]:
    def both(action_name: str) -> None:
        one(action_name)
        other(action_name)

    return both


def action_context(action: str, trainer: Trainer, watch: Stopwatch) -> _Context:
    """Return the context that books an action on its phase; one that does nothing if it is part of what is around it.

    Args:
        action: As Lightning names it: ``"run_training_batch"``, ``"[Callback]EarlyStopping.on_train_batch_end"``.
        trainer: Whose action.
        watch: Where the time is booked.
    """
    owner, hook = _owner_and_hook(action)
    if action == RUN_STEP:
        return watch.booked(TRAINING_STEP, action)
    if owner == "Strategy" and hook == "batch_to_device":
        return watch.booked(HOST_TO_DEVICE_COPY, action, except_in=VALIDATION)
    phase = None
    if owner == "Callback":
        phase = _callback_phase(action, hook, trainer.callbacks)  # type: ignore[attr-defined]
    elif owner == "LightningModule":
        phase = _users_phase(trainer.lightning_module, LightningModule, hook)
    elif owner == "LightningDataModule":
        phase = _users_phase(trainer.datamodule, LightningDataModule, hook)  # type: ignore[attr-defined]
    if phase is None:
        return nullcontext(action)
    return watch.booked(phase, action, except_in=VALIDATION if hook in _TRANSFER_HOOKS else "")


def is_ours(callback: Callback) -> bool:
    """Return whether the callback is one of this package."""
    return type(callback).__module__.startswith("lightning_gpu_tools.")


def _owner_and_hook(action: str) -> tuple[str, str]:
    owner, bracket, name = action.partition("]")
    return (owner[1:], name.rpartition(".")[2]) if bracket else ("", action)


def _callback_phase(action: str, hook: str, callbacks: Sequence[Callback]) -> str | None:
    for callback in callbacks if hook in _TIMED_HOOKS else ():
        overridden = getattr(type(callback), hook, None) is not getattr(Callback, hook)
        # LambdaCallback has its hooks on the instance.
        if (overridden or hook in vars(callback)) and action == f"[Callback]{callback.state_key}.{hook}":
            if not is_ours(callback):
                return f"{CALLBACK}/{type(callback).__name__}"
            # Ours does nearly always nothing there; what it does now and then is booked by `StepClock.as_own_work`.
            return None if hook == "on_train_batch_end" else MONITORING
    return None


def _users_phase(owner: LightningModule | LightningDataModule | None, base: type, hook: str) -> str | None:
    timed = hook in _TRANSFER_HOOKS or (hook in _TIMED_HOOKS and hook != "on_validation_end")
    if timed and getattr(type(owner), hook, None) is not getattr(base, hook, None):
        return f"{CALLBACK}/{type(owner).__name__}.{hook}"
    return None


def time_loggers(trainer: Trainer, wrappers: Wrappers, watch: Stopwatch) -> None:
    """Book what loggers take in the training thread, each under its name, which no action covers."""
    for logger in trainer.loggers:
        for method in ("log_metrics", "save"):
            wrappers.put(logger, method, partial(_timed_here, watch, f"{LOGGING}/{type(logger).__name__}"))


def _timed_here(watch: Stopwatch, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    thread, timed = threading.get_ident(), watch.timed(phase, function)

    def timed_here(*args: Any, **kwargs: Any) -> Any:
        return (timed if threading.get_ident() == thread else function)(*args, **kwargs)

    return timed_here
