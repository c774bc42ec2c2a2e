"""The settings of a DataLoader: read, changed in a copy, and why those of some loaders are left alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from lightning_gpu_tools.training.run_measurements import LoaderSettings


def settings_of(loader: DataLoader[Any]) -> LoaderSettings:
    """Return the settings of a DataLoader."""
    return LoaderSettings(
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory=loader.pin_memory,
        batch_size=loader.batch_size,
    )


def copy_with(loader: DataLoader[Any], settings: LoaderSettings) -> DataLoader[Any]:
    """Return a copy of a DataLoader with other settings, which shares everything else with it.

    The constructor is not called again: a subclass may have arguments of its own, and a sampler or a batch sampler
    cannot always be given twice.
    """
    changed = copy.copy(loader)
    set_settings(changed, settings)
    vars(changed)["_iterator"] = None
    if not settings.num_workers:
        # Both mean something for workers only, and the loader insists that they are not set without any.
        vars(changed).update(timeout=0, _DataLoader__multiprocessing_context=None)
    return changed


def set_settings(loader: DataLoader[Any], settings: LoaderSettings) -> None:
    """Write settings into a DataLoader that is not being iterated; it refuses some of them as attributes."""
    vars(loader).update(
        num_workers=settings.num_workers,
        prefetch_factor=settings.prefetch_factor,
        persistent_workers=settings.persistent_workers,
        pin_memory=settings.pin_memory,
    )


def why_fixed(loader: object) -> str | None:
    """Return why the settings of a loader cannot be changed without changing what it loads; ``None`` if they can."""
    kind = type(loader)
    if not isinstance(loader, DataLoader):
        return f"it is a {kind.__module__}.{kind.__qualname__}, not a torch DataLoader"
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return f"a {kind.__qualname__} keeps its position (state_dict), which new workers would lose"
    if isinstance(loader.dataset, (IterableDataset, MapDataPipe)):
        return (
            f"its dataset is iterable ({type(loader.dataset).__qualname__}): how it divides itself among workers is "
            "its own doing, and with another number of them it could repeat or lose samples"
        )
    if not loader.in_order:
        return "in_order=False: the order of its batches depends on the workers"
    own_ways = [
        name
        for name in ("_get_iterator", "_index_sampler", "_auto_collation")
        if getattr(kind, name, None) is not getattr(DataLoader, name)
    ]
    if own_ways:
        return f"{kind.__qualname__} has its own {' and '.join(own_ways)}"
    return None


def batch_bytes(batch: Any) -> int:
    """Return the size of all tensors in a batch of nested lists, tuples and dictionaries, in bytes."""
    if isinstance(batch, torch.Tensor):
        return batch.element_size() * batch.numel()
    if isinstance(batch, dict):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        return 0
    return sum(batch_bytes(part) for part in batch)
