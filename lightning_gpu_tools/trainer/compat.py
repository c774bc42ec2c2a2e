"""Lightning's private and version-dependent names, each with the loss without it; for torch's, see training.compat.

The report lists names that ``fit_timer`` does not find under "Not measured".
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_gpu_tools.trainer.families import Trainer

# Around forward, backward and optimizer. Lost: time between them counts as the Trainer's own work.
RUN_STEP = "run_training_batch"
SAVE_CHECKPOINT = "save_checkpoint"  # Lost: checkpoints outside of checkpoint callbacks


def batch_of_step(args: Sequence[Any]) -> Any:
    """Return the batch among the arguments of a loop's ``run`` for one step, or of ``Strategy.predict_step``.

    Lost: the sizes of batches.
    """
    return args[-1].get("batch") if args and isinstance(args[-1], dict) else args[0] if args else None


# Of validation, in a fit: creates the iterator. Lost: what validation waits for.
VALIDATION_RESET = "fit_loop.epoch_loop.val_loop.reset"


def fetch_of(loop: Any, stage: str) -> str:
    """Return the profiler's name for the fetch of a batch by a loop. Lost: waits and steps."""
    return f"[{type(loop).__name__}].{stage}_next"


# Since Lightning 2.5.2, a step with several ranks first checks whether any rank got a signal to stop. Lost: the same.
SIGNAL_CHECK = "_broadcast_sigterm_tensor"
# Where the metrics of ``self.log`` are collected. Lost: the same.
METRICS = ("_logger_connector.on_batch_end", "_logger_connector.on_epoch_end", "_logger_connector.log_metrics")

# In validate, test and predict: called before the first batch. Lost: the report.
_EVALUATED, _PREDICTED = "_on_evaluation_epoch_start", "_on_predict_epoch_start"
EVALUATION = {"validate": _EVALUATED, "test": _EVALUATED, "predict": _PREDICTED}

# In the module ``trainer.call``: the last functions called in a run that failed, and in any other run. Lost: a report
# if this package's callbacks are not called at the end, because they were removed or another callback raised.
CALLS, AFTER_ERROR, AFTER_RUN = "trainer.call", "_interrupt", "_call_teardown_hook"


def logged_step(trainer: Trainer) -> int:
    """Return the step of the metrics of ``self.log``. Lost: the optimizer's step is used, which may be another."""
    done: int | None = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", None)
    return trainer.global_step if done is None else done


def loads_with_torch(plugin: Any) -> bool:
    """Return whether a plugin leaves loading to Lightning's own plugin, which on Lightning 2.5 runs a file's code.

    Lost: the plugin loads the file.
    """
    while type(plugin).load_checkpoint.__module__.endswith(".plugins.io.wrapper"):  # AsyncCheckpointIO
        plugin = plugin.checkpoint_io
    return bool(type(plugin).load_checkpoint.__module__.endswith(".plugins.io.torch_io"))


def iterators_of(loop: Any) -> Sequence[object]:
    """Return the iterators of a loop's loaders; of one that reads them in turn, the current one. Lost: the workers."""
    return getattr(_iterator_over_all(loop), "iterators", None) or ()


def loaders_of(loop: Any) -> Sequence[object]:
    """Return the loaders of a loop. Lost: their settings."""
    return getattr(getattr(loop, "_combined_loader", None), "flattened", None) or ()


def loader_of(loop: Any) -> object | None:
    """Return the current loader of a loop that reads its loaders in turn. Lost: that of the first one counts."""
    loaders, place = loaders_of(loop), getattr(_iterator_over_all(loop), "_iterator_idx", 0)
    return loaders[min(place, len(loaders) - 1)] if loaders else None


def _iterator_over_all(loop: Any) -> object | None:
    combined = getattr(getattr(loop, "_data_fetcher", None), "_combined_loader", None)
    return getattr(combined, "_iterator", None)


def batches_done(loop: Any) -> int:
    """Return the number of batches that validate, test or predict has completed. Lost: the step of an error."""
    return int(getattr(getattr(getattr(loop, "batch_progress", None), "current", None), "completed", 0))


def validation_is_due(trainer: Trainer) -> bool:
    """Return whether validation follows on this step. Lost: a run resumed from this step leaves it out."""
    epoch_loop = trainer.fit_loop.epoch_loop
    is_due = getattr(epoch_loop, "_should_check_val_fx", lambda fetcher: False)
    return bool(is_due(getattr(trainer.fit_loop, "_data_fetcher", None)))


def end_restart(trainer: Trainer) -> None:
    """Tell a resumed fit that it continues like any other, from its first step on.

    Lost: ReduceLROnPlateau misses its step at the end of a resumed epoch.
    """
    fit_loop: Any = trainer.fit_loop
    fit_loop._restarting = False  # the property's setter makes it true again where max_steps is set


_OPTIONS = ("fx", "name", "prog_bar", "logger", "on_step", "metric_attribute")  # of `self.log`
_STATES = ("value", "cumulated_batch_size", "_forward_cache")  # the last one is what the last step logged
_MAX_BYTES = 2**20  # our default: metrics that keep all predictions would make checkpoints large


def metrics_so_far(trainer: Trainer) -> dict[str, Any]:
    """Return the metrics of this epoch that this rank has collected, as plain data, which Lightning does not save.

    These are the sums of ``self.log(..., on_epoch=True)`` and the states of the module's torchmetrics. Lost: an epoch
    that was resumed logs the mean of the batches after that.
    """
    logged = {}
    for key, result in getattr(trainer.fit_loop.epoch_loop, "_results", {}).items():
        meta = result.meta
        if meta.on_epoch and not result.has_reset:
            states = {name: getattr(result, name, None) for name in _STATES if result.is_tensor}  # else of torchmetrics
            options = {name: getattr(meta, name) for name in _OPTIONS}
            logged[key] = {
                "states": {name: value.clone() for name, value in states.items() if value is not None},
                "options": {**options, "reduce_fx": meta.reduce_fx.__name__, "sync_dist": meta.sync.should},
            }
    return {"logged": logged, "modules": {name: dict(metric.metric_state) for name, metric in _modules(trainer)}}


def restore_metrics(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Log again what was logged before the first batch of a resumed epoch, and set the module's own metrics."""
    for name, metric in _modules(trainer):
        for state, value in saved["modules"].get(name, {}).items():
            setattr(metric, state, value.to(metric.device))
            metric._update_count = 1  # else torchmetrics warns that it was never updated
    trainer._logger_connector._first_loop_iter = False  # the first batch would reset the metrics of its epoch
    results: Any = getattr(trainer.fit_loop.epoch_loop, "_results", {})
    modules = dict(trainer.lightning_module.named_modules())
    for key, entry in saved["logged"].items():
        states = {name: value.to(trainer.strategy.root_device) for name, value in entry["states"].items()}
        value = states.get("value", modules.get(entry["options"]["metric_attribute"]))
        if value is None:  # the module has no such metric any more
            continue
        results.log(value=value, on_epoch=True, batch_size=1, sync_dist_fn=trainer.strategy.reduce, **entry["options"])
        vars(results[key]).update(states)
        results[key].meta = _RestoredOptions(results[key])


class _RestoredOptions:
    """Options of ``self.log`` that equal those of its first call after resuming, which replace them."""

    def __init__(self, result: Any) -> None:
        self._result, self._options = result, result.meta

    def __getattr__(self, name: str) -> Any:
        return getattr(self._options, name)

    def __eq__(self, options: object) -> bool:
        self._result.meta = options
        return True


def _modules(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield the torchmetrics of the module whose states are small tensors, with their names."""
    kind = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    for name, metric in trainer.lightning_module.named_modules():
        if isinstance(metric, kind):
            states = metric.metric_state.values()
            are_tensors = all(isinstance(state, torch.Tensor) for state in states)
            if are_tensors and sum(state.nbytes for state in states) < _MAX_BYTES:
                yield name, metric
