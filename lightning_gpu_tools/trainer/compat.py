"""Lightning's private and version-dependent names, each with the loss without it; for torch's, see training.compat.

The report lists names that ``fit_timer`` does not find under "Not measured".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def logged_results(trainer: Trainer) -> Any:
    """Return what ``self.log`` has collected in this epoch, by name of hook and metric.

    Lost: an epoch that was resumed logs the mean of the batches after that.
    """
    return getattr(trainer.fit_loop.epoch_loop, "_results", {})


def begin_within_epoch(trainer: Trainer) -> None:
    """Let the first batch add to the metrics of its epoch, which it would reset. Lost: the same as above."""
    trainer._logger_connector._first_loop_iter = False


def end_restart(trainer: Trainer) -> None:
    """Tell a resumed fit that it continues like any other, from its first step on.

    Lost: ReduceLROnPlateau misses its step at the end of a resumed epoch.
    """
    fit_loop: Any = trainer.fit_loop
    fit_loop._restarting = False  # the property's setter makes it true again where max_steps is set
