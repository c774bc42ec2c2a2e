"""Times one fit of one Trainer: listens to its profiler, wraps its loops and loggers, and drives a step clock.

Lightning puts every hook, the training step and the fetch of a batch between ``profiler.start(name)`` and
``profiler.stop(name)``, also when nobody profiles: then its ``PassThroughProfiler`` makes a generator for each of some
thirty actions a step to do nothing. Here that costs a lookup in a table, which is why a training that is timed is not
slower than one that is not. A profiler of the user's goes on as before, within the times taken here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch

from lightning_gpu_tools.gpus.sampler import Phase
from lightning_gpu_tools.runs.failures import FETCH, noting_index
from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.facts import TrainerRun, is_plain_ddp, trains_on_gpu
from lightning_gpu_tools.trainer.families import Callback, Trainer, base_of
from lightning_gpu_tools.trainer.wrappers import Wrappers, after, before
from lightning_gpu_tools.training.memory_counters import MemoryCounters
from lightning_gpu_tools.training.phases import (
    BACKWARD,
    CALLBACK,
    CHECKPOINT,
    EPOCH_START,
    FORWARD,
    GRADIENT_CLIPPING,
    GRADIENT_SCALER,
    HOST_TO_DEVICE_COPY,
    LOGGING,
    MONITORING,
    OPTIMIZER,
    RANK_WAIT,
    SELF_LOG,
    TRAINER,
    TRAINING_STEP,
    VALIDATION,
    ZERO_GRAD,
    base_phase,
)
from lightning_gpu_tools.training.rank_waits import RankWaits
from lightning_gpu_tools.training.step_clock import StepClock

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
# Hooks of the strategy, and of a model that does not override them.
_STEP_PARTS = {
    "training_step": FORWARD,
    "backward": BACKWARD,
    "optimizer_step": OPTIMIZER,
    "optimizer_zero_grad": ZERO_GRAD,
    "configure_gradient_clipping": GRADIENT_CLIPPING,
}
_USERS_HOOKS = (_TIMED_HOOKS - {"on_validation_end"}) | _TRANSFER_HOOKS | _STEP_PARTS.keys() | {"lr_scheduler_step"}
# Our default: a user's own actions may have a number in their names, and are not kept without end.
_MAX_CONTEXTS = 1000

_Context = AbstractContextManager[Any]


class FitTimer:
    """Drives a step clock from a Trainer's fit; make it in ``Callback.setup``. It comes off when the fit ends.

    What a future Lightning has under another name cannot be timed: it stays part of the phase around it and is named in
    ``unseen``.

    ``enter`` is called with the phase when validation begins and when training goes on.

    Attributes:
        rank_waits: Takes waiting for other ranks out of the clock's phases.
        memory: Counts the memory of this rank's GPU; ``None`` on another device, and before the fit begins.
        fault: The error that has ended the timing; ``None`` if all is well.
    """

    def __init__(self, trainer: Trainer, clock: StepClock, enter: Callable[[Phase], None] = lambda phase: None) -> None:
        self.clock = clock
        self.fault: Exception | None = None
        self.rank_waits = RankWaits(clock)
        self.memory: MemoryCounters | None = None
        self._trainer = trainer
        self._enter = enter
        self._callbacks = tuple(trainer.callbacks)  # type: ignore[attr-defined]
        self._wrappers = Wrappers()
        self._wrap = self._wrappers.put
        self._wrap(torch.utils.data, FETCH, noting_index)  # before workers are forked
        start, end = partial(self._safely, self._start), partial(self._safely, self._end)
        self._wrap(trainer, "fit_loop.on_run_start", lambda function: before(start)(self._timed_in_fit(function)))
        self._wrap(trainer, "fit_loop.on_run_end", lambda function: after(end)(self._timed_in_fit(function)))

    def _safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the Trainer calls this, and whatever it is, it is not its error
            self.fault = error
            self.stop()

    def stop(self) -> None:
        """Stop the clock and take every wrapper off; nothing happens the second time."""
        self.clock.stop()
        self._wrappers.undo()

    @property
    def unseen(self) -> list[str]:
        """What could not be timed."""
        has_stepped = any(base_phase(phase) == TRAINING_STEP for phase in self.clock.seconds)
        no_fetches = [compat.fetch_action(self._trainer)] if has_stepped and not self.clock.steps else []
        return [*self._wrappers.missing, *no_fetches]

    @property
    def is_trial(self) -> bool:
        """Whether a tuner (BatchSizeFinder, LearningRateFinder) tries something: it takes the callbacks out."""
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        return bool(self._callbacks) and not any(callback in callbacks for callback in self._callbacks)

    def _end(self) -> None:
        if not self.clock.running or self.is_trial:
            return
        self.stop()
        trainer = self._trainer
        for callback in self._callbacks:  # Lightning calls no more hooks of one of ours that was taken out meanwhile
            if is_ours(callback) and callback not in trainer.callbacks:  # type: ignore[attr-defined]
                callback.teardown(trainer, trainer.lightning_module, "fit")

    def _start(self) -> None:
        if self.clock.running or self.is_trial:
            return
        trainer, clock = self._trainer, self.clock
        self._time("fit_loop.on_advance_start", EPOCH_START)
        self._time("fit_loop.epoch_loop.on_run_start", EPOCH_START)
        self._wrap(trainer, "fit_loop.epoch_loop.on_run_start", before(clock.begin_epoch))
        self._time("fit_loop.advance", TRAINER)
        self._time("fit_loop.on_advance_end", TRAINER)
        if trainer.world_size > 1:
            self._book_rank_waits()
        self._time_step()
        for method in compat.METRICS:
            self._time(method, f"{LOGGING}/{SELF_LOG}", except_in=VALIDATION)
        self._time("fit_loop.epoch_loop.val_loop.run", VALIDATION)
        self._wrap(trainer, "fit_loop.epoch_loop.val_loop.run", before(partial(self._enter, "validation")))
        self._wrap(trainer, "fit_loop.epoch_loop.val_loop.run", after(partial(self._enter, "training")))
        self._time("save_checkpoint", CHECKPOINT)
        self._time("strategy.remove_checkpoint", CHECKPOINT)
        self._time_actions()
        for logger in trainer.loggers:
            for method in ("log_metrics", "save"):  # which no action covers
                self._wrap(logger, method, partial(clock.timed_here, f"{LOGGING}/{type(logger).__name__}"))
        clock.start()

    def _book_rank_waits(self) -> None:
        self._wrap(torch.distributed, "Work.wait", self.rank_waits.timed)
        if compat.asks_for_signals(self._trainer):
            self._time(compat.SIGNAL_CHECK, f"{RANK_WAIT}/signal check")
        self._wrap(self._trainer, "strategy.backward", self.rank_waits.around_backward)
        if is_plain_ddp(self._trainer):
            self._wrap(self._trainer, "strategy.model._sync_buffers", self.rank_waits.timed)

    def _time_step(self) -> None:
        """Time what no action covers of a training step."""
        trainer, clock, model = self._trainer, self.clock, self._trainer.lightning_module
        if trains_on_gpu(trainer):
            gpu = self.rank_waits.gpu = clock.measure_gpu()
            self._wrap(trainer, "fit_loop.epoch_loop.automatic_optimization.run", gpu.around)
            self._wrap(trainer, "fit_loop.epoch_loop.manual_optimization.run", gpu.around)
            self._wrap(trainer, "strategy.training_step", partial(gpu.part, FORWARD))
            self._wrap(trainer, "strategy.backward", partial(gpu.part, BACKWARD))
            self._wrap(trainer, "strategy.optimizer_step", partial(gpu.part, OPTIMIZER))
            memory = self.memory = MemoryCounters(TrainerRun(trainer), clock)
            self._wrap(trainer, "fit_loop.epoch_loop.automatic_optimization.run", memory.around_step)
            self._wrap(trainer, "fit_loop.epoch_loop.manual_optimization.run", memory.around_step)
            if model.automatic_optimization:  # else all of the step is in there
                self._wrap(trainer, "strategy.training_step", memory.after_forward)
            self._wrap(trainer, "strategy.backward", memory.around_backward)
        if not model.automatic_optimization:
            self._time("strategy.backward", BACKWARD)
            self._wrap(trainer, "strategy.optimizer_step", clock.timed_optimizer_step)
            self._time("strategy.precision_plugin.clip_gradients", GRADIENT_CLIPPING)
        if _overrides(model, "LightningModule", "optimizer_step"):
            self._time("strategy.optimizer_step", OPTIMIZER)
        if _overrides(model, "LightningModule", "configure_gradient_clipping"):
            self._time("strategy.precision_plugin.clip_gradients", GRADIENT_CLIPPING)
        if _overrides(model, "LightningModule", "backward"):
            self._time("strategy.precision_plugin.backward", f"{TRAINING_STEP}/{type(model).__name__}.backward")
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            for method in ("scale", "unscale_", "update"):
                self._time(f"strategy.precision_plugin.scaler.{method}", GRADIENT_SCALER)

    def _time(self, method: str, phase: str, except_in: str = "") -> None:
        self._wrap(self._trainer, method, partial(self.clock.timed, phase, except_in=except_in))

    def _timed_in_fit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what the Trainer does at the beginning or the end, timed only while a clock runs: not in a trial."""
        booked = self.clock.booked(TRAINER)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with booked if self.clock.running else nullcontext():
                return function(*args, **kwargs)

        return timed

    def _time_actions(self) -> None:
        trainer, profiler = self._trainer, self._trainer.profiler  # type: ignore[attr-defined]
        contexts = _Contexts(lambda action: action_context(action, trainer, self.clock))
        # The parameters are called as in Lightning, so that they can be given by name.
        if type(profiler) is base_of(profiler, "PassThroughProfiler"):  # which does nothing but at a price
            self._wrap(profiler, "profile", lambda profile: lambda action_name: contexts[action_name])
        else:
            self._wrap(profiler, "profile", lambda profile: _around(profile, contexts))
        fetch = compat.fetch_action(self._trainer)
        begin_fetch, end_fetch = self.clock.begin_fetch, self.clock.end_fetch

        def starting(start: Callable[[str], None]) -> Callable[[str], None]:
            def started(action_name: str) -> None:
                if action_name == fetch:
                    begin_fetch()
                start(action_name)

            return started

        def stopping(stop: Callable[[str], None]) -> Callable[[str], None]:
            def stopped(action_name: str) -> None:
                stop(action_name)
                if action_name == fetch:
                    end_fetch()

            return stopped

        self._wrap(profiler, "start", starting)
        self._wrap(profiler, "stop", stopping)


class _Untimed(str):
    """The context of an action that is not timed; it gives the action's name.

    Some twenty of them are entered in every step. Both methods are C functions, because the Python frames of a
    ``nullcontext`` were a third of what a step cost. What ``__exit__`` returns is empty, so no error is held back.
    """

    __slots__ = ()
    __enter__ = str.__str__
    __exit__: ClassVar[Any] = staticmethod("".format)


class _Contexts(dict[str, _Context]):
    """The context of each action, made when it is asked for."""

    def __init__(self, make: Callable[[str], _Context]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, action: str) -> _Context:
        try:
            context = self._make(action)
        except Exception:  # noqa: BLE001 - a callback that is unlike any other: it is not timed, and training goes on
            context = _Untimed(action)
        if len(self) < _MAX_CONTEXTS:
            self[action] = context
        return context


def _around(profile: Callable[[str], _Context], contexts: Mapping[str, _Context]) -> Callable[[str], _Context]:
    @contextmanager  # the parameter is called as in Lightning, so that it can be given by name
    def both(action_name: str) -> Iterator[Any]:
        with contexts[action_name], profile(action_name) as given:
            yield given

    return both


def action_context(action: str, trainer: Trainer, clock: StepClock) -> _Context:
    """Return the context that books an action on its phase; one that does nothing if it is part of what is around it.

    Lightning names actions ``"run_training_batch"``, ``"[Callback]EarlyStopping.on_train_batch_end"``.
    """
    owner, hook = _owner_and_hook(action)
    if action == compat.RUN_STEP:
        return clock.booked(TRAINING_STEP, action)
    if owner == "Strategy" and hook == "batch_to_device":
        return clock.booked(HOST_TO_DEVICE_COPY, action, except_in=VALIDATION)
    phase = None
    if owner == "Callback":
        phase = _callback_phase(action, hook, trainer.callbacks)  # type: ignore[attr-defined]
    elif owner == "LightningModule":
        phase = _users_phase(trainer.lightning_module, "LightningModule", hook) or _default_phase(trainer, hook)
    elif owner == "LightningDataModule":
        phase = _users_phase(trainer.datamodule, "LightningDataModule", hook)  # type: ignore[attr-defined]
    elif owner == "Strategy":
        phase = _STEP_PARTS.get(hook) or _users_phase(trainer.strategy, "Strategy", hook)
    if phase is None:
        return _Untimed(action)
    return clock.booked(phase, action, except_in=VALIDATION if hook in _TRANSFER_HOOKS else "")


def is_ours(callback: Callback) -> bool:
    """Return whether the callback is one of this package."""
    return type(callback).__module__.startswith("lightning_gpu_tools.")


def _owner_and_hook(action: str) -> tuple[str, str]:
    owner, bracket, name = action.partition("]")
    return (owner[1:], name.rpartition(".")[2]) if bracket else ("", action)


def _callback_phase(action: str, hook: str, callbacks: Sequence[Callback]) -> str | None:
    for callback in callbacks if hook in _TIMED_HOOKS else ():
        overridden = _overrides(callback, "Callback", hook)
        # LambdaCallback has its hooks on the instance.
        if (overridden or hook in vars(callback)) and action == f"[Callback]{callback.state_key}.{hook}":
            if base_of(callback, "Checkpoint"):
                return CHECKPOINT  # also what it does besides writing: it removes files and looks for their names
            if not is_ours(callback):
                return f"{CALLBACK}/{type(callback).__name__}"
            # Ours does nearly always nothing there; what it does now and then is booked by `StepClock.as_own_work`.
            return None if hook in ("on_train_batch_start", "on_train_batch_end") else MONITORING
    return None


def _users_phase(owner: object, base: str, hook: str) -> str | None:
    """Return the phase of a hook that the model, the DataModule or the strategy overrides."""
    is_timed = hook in _USERS_HOOKS and _overrides(owner, base, hook)
    return f"{CALLBACK}/{type(owner).__name__}.{hook}" if is_timed else None


def _overrides(owner: object, base: str, hook: str) -> bool:
    """Return whether the owner has another method there than Lightning's ``base``; so has what is not made from it."""
    own_base = base_of(owner, base)
    return own_base is None or getattr(type(owner), hook, None) is not getattr(own_base, hook, None)


def _default_phase(trainer: Trainer, hook: str) -> str | None:
    """Return the phase of a hook that the model leaves as Lightning has it."""
    if hook == "lr_scheduler_step":
        names = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
        return f"{CALLBACK}/{' and '.join(names)}.step"
    if hook == "configure_gradient_clipping" and not trainer.gradient_clip_val:
        return None  # which does nothing then
    return _STEP_PARTS.get(hook)
