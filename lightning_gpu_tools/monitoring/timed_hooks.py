"""Times the hooks of callbacks and of the model, and the loggers, each under its own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_gpu_tools.monitoring.phases import CALLBACK, LOGGING, MONITORING
from lightning_gpu_tools.monitoring.wrappers import Wrappers

# Those of validation but the last are part of the phase "validation".
_TIMED_HOOKS = (
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
)

# The model's own, beside those above.
_MODULE_HOOKS = (*_TIMED_HOOKS[:-3], "on_train_epoch_end", "on_before_batch_transfer", "on_after_batch_transfer")

_Function = Callable[..., Any]


def time_hooks(trainer: Trainer, wrappers: Wrappers, timed: Callable[[str], Callable[[_Function], _Function]]) -> None:
    """Wrap what a training calls of its user.

    Args:
        trainer: Whose training.
        wrappers: Where they are put on.
        timed: Makes the wrapper that books time on a phase.
    """
    for logger in trainer.loggers:
        for method in ("log_metrics", "save"):
            wrappers.put(logger, method, timed(f"{LOGGING}/{type(logger).__name__}"))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        _time_callback(callback, wrappers, timed)
    module = trainer.lightning_module
    for hook in _MODULE_HOOKS if module is not None else ():
        if getattr(type(module), hook, None) is not getattr(LightningModule, hook):
            wrapper = timed(f"{CALLBACK}/{type(module).__name__}.{hook}")
            wrappers.put(module, hook, _module_hook(module, hook, wrapper))


def _time_callback(
    callback: Callback, wrappers: Wrappers, timed: Callable[[str], Callable[[_Function], _Function]]
) -> None:
    ours = type(callback).__module__.startswith("lightning_gpu_tools.")
    phase = MONITORING if ours else f"{CALLBACK}/{type(callback).__name__}"
    for hook in _TIMED_HOOKS:
        if ours and hook == "on_train_batch_end":
            continue  # nearly always it does nothing; what it does now and then is booked by `StepClock.as_own_work`
        overridden = getattr(type(callback), hook, None) is not getattr(Callback, hook)
        if overridden or hook in vars(callback):  # LambdaCallback has its hooks on the instance
            wrappers.put(callback, hook, timed(phase))


def _module_hook(
    module: LightningModule, name: str, wrapper: Callable[[_Function], _Function]
) -> Callable[[_Function], _Function]:
    return lambda hook: _ModuleHook(module, name, hook, wrapper(hook))


class _ModuleHook:
    """A hook of a LightningModule with its time booked. A model that is pickled or copied meanwhile loses it again."""

    def __init__(self, module: LightningModule, name: str, hook: _Function, timed: _Function) -> None:
        self.__wrapped__ = hook  # Lightning looks through it, to see that the model has this hook
        self._place = module, name
        self._timed = timed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[LightningModule, str]]:
        return getattr, self._place
