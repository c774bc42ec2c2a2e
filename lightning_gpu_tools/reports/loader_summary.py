"""What a report keeps of the search for DataLoader settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_gpu_tools.advice.loader_trials import LoaderResult, trial_of
from lightning_gpu_tools.units import format_duration, printable


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSummary:
    """What NumWorkersFinder found.

    Attributes:
        users: The original settings: ``num_workers``, ``prefetch_factor``, ``persistent_workers``,
            ``pin_memory``, ``batch_size``; ``None`` if the loader is not a torch DataLoader.
        settings: The settings found, likewise.
        applied: Whether they were in use at the end.
        confirmed: Whether they were as good in the first hundred steps of their use; ``None`` if that was not seen.
        reason: Why these, with numbers.
        users_batches_per_s: Speed of loader and step together with the original settings; ``None`` if not measured.
        batches_per_s: Speed with the settings found, likewise.
        wait_share: Part of the time that training waited for data with them; ``None`` if not measured.
        seconds: How long the search took.
    """

    users: Mapping[str, Any] | None
    settings: Mapping[str, Any] | None
    applied: bool
    confirmed: bool | None
    reason: str
    users_batches_per_s: float | None
    batches_per_s: float | None
    wait_share: float | None
    seconds: float


def summarize(result: LoaderResult) -> LoaderSummary:
    """Return the summary of a search."""
    before, after = trial_of(result.trials, result.original), trial_of(result.trials, result.settings)
    return LoaderSummary(
        users=None if result.original is None else dataclasses.asdict(result.original),
        settings=None if result.settings is None else dataclasses.asdict(result.settings),
        applied=result.applied,
        confirmed=result.confirmed,
        reason=result.reason,
        users_batches_per_s=None if before is None else before.batches_per_s,
        batches_per_s=None if after is None else after.batches_per_s,
        wait_share=result.wait_share,
        seconds=result.seconds,
    )


def loader_line(loader: LoaderSummary) -> str:
    """Return the summary in one line."""
    if loader.settings is None or not loader.seconds:
        return f"NumWorkersFinder: {loader.reason}"
    found = f"num_workers={printable(loader.settings.get('num_workers'))}"
    state = "in use" if loader.applied else "not in use"
    return f"NumWorkersFinder found {found} in {format_duration(loader.seconds)} ({state}). {loader.reason}"
