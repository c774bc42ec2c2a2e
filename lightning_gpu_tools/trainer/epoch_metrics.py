"""An epoch's metrics so far, saved to a checkpoint and restored.

Lightning saves neither the sums of ``self.log(..., on_epoch=True)`` nor the states of a module's torchmetrics, so an
epoch that was resumed would log the mean of the batches after that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.families import Trainer

_OPTIONS = ("fx", "name", "prog_bar", "logger", "on_step", "metric_attribute")  # of `self.log`
_STATES = ("value", "cumulated_batch_size", "_forward_cache")  # the last one is what the last step logged
_MAX_BYTES = 2**20  # our default: metrics that keep all predictions would make checkpoints large


def collected(trainer: Trainer) -> dict[str, Any]:
    """Return what this rank has collected, as plain data."""
    logged = {}
    for key, result in compat.logged_results(trainer).items():
        meta = result.meta
        if meta.on_epoch and not result.has_reset:
            states = {name: getattr(result, name, None) for name in _STATES if result.is_tensor}  # else of torchmetrics
            options = {name: getattr(meta, name) for name in _OPTIONS}
            logged[key] = {
                "states": {name: value.clone() for name, value in states.items() if value is not None},
                "options": {**options, "reduce_fx": meta.reduce_fx.__name__, "sync_dist": meta.sync.should},
            }
    return {"logged": logged, "modules": {name: dict(metric.metric_state) for name, metric in _modules(trainer)}}


def restore(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Log again what was logged before the first batch of a resumed epoch, and set the module's own metrics."""
    for name, metric in _modules(trainer):
        for state, value in saved["modules"].get(name, {}).items():
            setattr(metric, state, value.to(metric.device))
            metric._update_count = 1  # else torchmetrics warns that it was never updated
    compat.begin_within_epoch(trainer)
    results, modules = compat.logged_results(trainer), dict(trainer.lightning_module.named_modules())
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
