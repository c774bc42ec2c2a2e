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

_REDUCTIONS = ("mean", "sum", "max", "min")
_OPTIONS = ("fx", "name", "prog_bar", "logger", "on_step", "metric_attribute")  # of `self.log`
_MAX_BYTES = 2**20  # our default: metrics that keep all predictions would make checkpoints large


def collected(trainer: Trainer) -> dict[str, Any]:
    """Return what this rank has collected, as plain data."""
    logged = {}
    for key, result in compat.logged_results(trainer).items():
        meta = result.meta
        reduction = next((name for name in _REDUCTIONS if getattr(meta, f"is_{name}_reduction")), None)
        if meta.on_epoch and reduction is not None:
            value = result.value.clone() if result.is_tensor else None  # None: of a torchmetric
            is_mean = result.is_tensor and reduction == "mean"
            logged[key] = {
                "value": value,
                "batch_size": result.cumulated_batch_size.clone() if is_mean else None,
                "reduction": reduction,
                "sync_dist": meta.sync.should,
                **{name: getattr(meta, name) for name in _OPTIONS},
            }
    return {"logged": logged, "modules": {name: dict(metric.metric_state) for name, metric in _modules(trainer)}}


def restore_modules(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Set the module's own metrics to their saved states."""
    for name, metric in _modules(trainer):
        if name in saved["modules"]:
            for state, value in saved["modules"][name].items():
                setattr(metric, state, value.to(metric.device))
            metric._update_count = 1  # else torchmetrics warns that it was never updated


def restore_ended(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Log again what an epoch without further batches has collected."""
    results, modules = compat.logged_results(trainer), dict(trainer.lightning_module.named_modules())
    for key, entry in saved["logged"].items():
        value = modules.get(entry["metric_attribute"]) if entry["value"] is None else entry["value"]
        if value is None:
            continue
        value = value.to(trainer.strategy.root_device)
        results.log(
            value=value,
            reduce_fx=entry["reduction"],
            on_epoch=True,
            batch_size=1,
            sync_dist_fn=trainer.strategy.reduce,
            **{name: entry[name] for name in ("sync_dist", *_OPTIONS)},
        )
        results[key].value = value
        if entry["batch_size"] is not None:
            results[key].cumulated_batch_size = entry["batch_size"].to(value.device)


def add_logged(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Add what was logged before resuming to what has been logged since, once for each name."""
    results, logged = compat.logged_results(trainer), saved["logged"]
    for key in logged.keys() & results.keys():
        result, entry = results[key], logged.pop(key)
        if entry["value"] is None:  # the metric itself has its state again
            continue
        before = entry["value"].to(result.value.device)
        if entry["reduction"] in ("mean", "sum"):
            result.value = before + result.value
        else:
            result.value = result.meta.reduce_fx(before, result.value)
        if entry["batch_size"] is not None:
            result.cumulated_batch_size = entry["batch_size"].to(result.value.device) + result.cumulated_batch_size


def _modules(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield the torchmetrics of the module whose states are small tensors, with their names."""
    kind = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    for name, metric in trainer.lightning_module.named_modules():
        if isinstance(metric, kind):
            states = metric.metric_state.values()
            if all(isinstance(state, torch.Tensor) for state in states) and sum(map(_size, states)) < _MAX_BYTES:
                yield name, metric


def _size(state: torch.Tensor) -> int:
    return state.element_size() * state.numel()
