"""What the search for settings shows: a line for each trial, a table at its end, hyperparameters for the loggers."""

from __future__ import annotations

import dataclasses
import math
from statistics import median
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from rich.console import Console
from rich.table import Table

from lightning_gpu_tools.advice.loader_trials import LoaderResult, LoaderTrial
from lightning_gpu_tools.training.run_measurements import LoaderSettings
from lightning_gpu_tools.units import format_duration


def show_trial(trial: LoaderTrial) -> None:
    """Say on rank zero what a trial has shown."""
    what = _words(trial.settings)
    if trial.failed is not None:
        rank_zero_info(f"NumWorkersFinder: {what}: {trial.failed}")
        return
    step_s = median(trial.block_step_s)
    rank_zero_info(
        f"NumWorkersFinder: {what}: {1 / step_s:.4g} batches/s, a step waits {format_duration(trial.wait_s)} of "
        f"{format_duration(step_s)}"
    )


def _words(settings: LoaderSettings) -> str:
    words = f"num_workers={settings.num_workers}"
    if settings.prefetch_factor is not None:
        words += f", prefetch_factor={settings.prefetch_factor}"
    if settings.persistent_workers:
        words += ", persistent_workers=True"
    return f"{words}, pin_memory=True" if settings.pin_memory else words


def show_result(result: LoaderResult) -> None:
    """Print everything that was tried, and what was found."""
    table = Table("DataLoader settings", "batches/s", "95 % bounds", "wait a step", title="NumWorkersFinder")
    for item in result.scores:
        words = _words(item.settings) + (" (yours)" if item.settings == result.users else "")
        if item.failed is not None:
            table.add_row(words, item.failed, "", "")
        else:
            bounds = f"{item.lower:.4g} to {item.upper:.4g}" if math.isfinite(item.upper) else "measured once"
            table.add_row(words, f"{item.batches_per_s:.4g}", bounds, format_duration(item.wait_s))
    found = "nothing" if result.settings is None else _words(result.settings)
    state = "in use" if result.applied else "not in use"
    table.caption = f"Found: {found} ({state}). {result.reason}"
    Console().print(table)


def log_settings(trainer: Trainer, result: LoaderResult) -> None:
    """Give the settings to the loggers as hyperparameters of their own, beside the user's."""
    if result.settings is None:
        return
    found = {"num_workers_finder": {**dataclasses.asdict(result.settings), "applied": result.applied}}
    for logger in trainer.loggers:
        _log_to(logger, found)


def _log_to(logger: Logger, found: dict[str, Any]) -> None:
    try:
        if isinstance(logger, TensorBoardLogger):
            # Without metrics it adds them to hparams.yaml and leaves the user's summary and hp_metric as they are.
            logger.log_hyperparams(found, metrics={})
        else:
            logger.log_hyperparams(found)
    except Exception as error:  # noqa: BLE001 - a logger of anybody's; training must go on
        rank_zero_warn(f"{type(logger).__name__} did not take the DataLoader settings: {error!r}")
