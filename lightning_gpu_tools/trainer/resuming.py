"""Checks while a Trainer restores a checkpoint: a file with only weights is refused."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sized
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_gpu_tools.checkpoints.content import is_lightning_checkpoint
from lightning_gpu_tools.checkpoints.key_tree import counted
from lightning_gpu_tools.checkpoints.sources import read_structure
from lightning_gpu_tools.errors import CheckpointMismatchError
from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.families import Callback, Trainer, is_lightnings, overrides
from lightning_gpu_tools.trainer.wrappers import Wrappers
from lightning_gpu_tools.units import printable_path


def check_while_restoring(trainer: Trainer, wrappers: Wrappers) -> None:
    """Refuse a file with only weights, until ``wrappers`` are removed."""
    wrappers.put(trainer.strategy, "load_model_state_dict", functools.partial(_checked_before_weights, trainer))
    if trainer.strategy.restore_checkpoint_after_setup:
        wrappers.put(trainer.strategy, "load_checkpoint", functools.partial(_checked_before_reading, trainer))


def check_before_restoring(trainer: Trainer) -> None:
    """Refuse a file with only weights once all hooks of ``fit`` have run; warn if the number of optimizers differs."""
    checkpoint = compat.loaded_checkpoint(trainer)
    if not checkpoint:
        return
    _refuse_weights_alone(checkpoint, trainer, trainer.ckpt_path)
    states = checkpoint.get("optimizer_states")
    number = len(trainer.optimizers)
    if trainer.strategy.lightning_restore_optimizer and isinstance(states, Sized) and len(states) != number:
        rank_zero_warn(
            f"{printable_path(trainer.ckpt_path)} holds the states of {counted(len(states), 'optimizer')}, but the "
            f"model has {number}. Lightning pairs them in order; the rest start without a state."
        )


def _refuse_weights_alone(checkpoint: Mapping[str, Any], trainer: Trainer, path: object) -> None:
    missing = [name for name in ("optimizer_states", "lr_schedulers") if name not in checkpoint]
    if missing and (trainer.strategy.lightning_restore_optimizer or "lr_schedulers" in missing):
        raise CheckpointMismatchError(
            f'{printable_path(path)} holds weights, but no "{missing[0]}" to resume from: it was saved with '
            "save_weights_only=True, or not by a Trainer. To start a new run from its weights, call "
            "lightning_gpu_tools.load_weights, and fit without ckpt_path."
        )


def _checked_before_weights(trainer: Trainer, load: Callable[..., None]) -> Callable[..., None]:
    """Check the checkpoint after the model's hook, unless a callback's hook, which runs later, may complete it."""

    def load_model_state_dict(checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        may_be_completed = checkpoint.get("callbacks") is not None and not all(
            is_lightnings(callback.on_load_checkpoint) for callback in callbacks
        )
        if trainer.state.fn == "fit" and not may_be_completed:
            _refuse_weights_alone(checkpoint, trainer, trainer.ckpt_path)
        load(checkpoint, *args, **kwargs)

    return load_model_state_dict


def _checked_before_reading(trainer: Trainer, load: Callable[..., Any]) -> Callable[..., Any]:
    """Check a file that the strategy reads without a plugin, as FSDP and ModelParallel do."""

    def load_checkpoint(path: Any, *args: Any, **kwargs: Any) -> Any:
        is_left_to_hook = overrides(trainer.lightning_module, "LightningModule", "on_load_checkpoint")
        if trainer.state.fn == "fit" and os.path.isfile(path) and not is_left_to_hook:
            content = read_structure(path).content
            if is_lightning_checkpoint(content):
                _refuse_weights_alone(content, trainer, path)
        return load(path, *args, **kwargs)

    return load_checkpoint
