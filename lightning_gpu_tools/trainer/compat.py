"""Every name of Lightning that is private or may change and that this package needs; for torch's see training.compat.

A release of Lightning without one of them costs what is said beside it, and never the training: a function then
returns ``None``. What is wrapped by its name (``fit_timer``) and is not there is named in the report as unseen.
"""

from __future__ import annotations

import re
from typing import Any

from lightning_gpu_tools.trainer.families import Trainer, version_of

# What Lightning calls forward, backward and optimizer. Without it what it does between them counts as the Trainer's own
# work.
RUN_STEP = "run_training_batch"

# Where every step of several ranks begins by asking all of them whether one was told to stop, since Lightning 2.5.2.
# Without it this is the Trainer's own work.
SIGNAL_CHECK = "fit_loop.epoch_loop._broadcast_sigterm_tensor"
_SIGNAL_CHECK_SINCE = [2, 5, 2]
# Where the metrics of ``self.log`` are collected. Without it this is the Trainer's own work.
METRICS = ("_logger_connector.on_batch_end", "_logger_connector.on_epoch_end", "_logger_connector.log_metrics")


def asks_for_signals(trainer: Trainer) -> bool:
    """Return whether this Lightning has a :data:`SIGNAL_CHECK`."""
    return [int(part) for part in re.findall(r"\d+", version_of(trainer)[1])[:3]] >= _SIGNAL_CHECK_SINCE


def fetch_action(trainer: Trainer) -> str:
    """Return what Lightning calls the fetch of a batch. Without it neither waits nor steps are counted."""
    return f"[{type(trainer.fit_loop.epoch_loop).__name__}].train_dataloader_next"


def logged_step(trainer: Trainer) -> int:
    """Return the step that Lightning gives the metrics of ``self.log``, so that both share an axis.

    Without it, it is the optimizer's step, which manual optimization and accumulated gradients count otherwise.
    """
    done: int | None = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", None)
    return trainer.global_step if done is None else done


def loaded_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Return the checkpoint that ``fit`` is about to restore, as hooks have left it.

    Without it only the weights in it are checked; other errors are Lightning's own.
    """
    return getattr(getattr(trainer, "_checkpoint_connector", None), "_loaded_checkpoint", None) or {}


def loads_with_torch(plugin: Any) -> bool:
    """Return whether a checkpoint plugin leaves loading to Lightning's own, which on Lightning 2.5 runs a file's code.

    Where these modules have other names, the plugin is asked to load.
    """
    while type(plugin).load_checkpoint.__module__.endswith(".plugins.io.wrapper"):  # AsyncCheckpointIO
        plugin = plugin.checkpoint_io
    return bool(type(plugin).load_checkpoint.__module__.endswith(".plugins.io.torch_io"))


def train_iterator(trainer: Trainer) -> object | None:
    """Return the iterator of the first training loader. Without it nothing is known of what the workers do."""
    fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
    combined = getattr(fetcher, "_combined_loader", None)
    iterators = getattr(getattr(combined, "_iterator", None), "iterators", None)
    return iterators[0] if iterators else None


def step_runner(trainer: Trainer) -> Any:
    """Return the loop whose ``run`` runs a training step. Without it no step is profiled."""
    kind = "automatic" if trainer.lightning_module.automatic_optimization else "manual"
    return getattr(trainer.fit_loop.epoch_loop, f"{kind}_optimization", None)
