"""The settings of a DataLoader: which it has, why they may be fixed, and a loader with other ones."""

from __future__ import annotations

import warnings
from dataclasses import asdict, fields
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpu_tools.training.run_measurements import LoaderSettings

# Private names of torch. Without the first one loaders are left alone, without the second one workers end when their
# iterator is dropped.
GET_ITERATOR = "_get_iterator"
SHUT_DOWN_WORKERS = "_shutdown_workers"


def settings_of(loader: DataLoader[Any]) -> LoaderSettings:
    """Return the settings that a DataLoader uses now, also if we have changed them."""
    if switch := vars(loader).get("switch"):
        in_use: LoaderSettings = switch.in_use
        return in_use
    return LoaderSettings(**{field.name: getattr(loader, field.name) for field in fields(LoaderSettings)})


def why_fixed(loader: object) -> str | None:
    """Return why other settings would change what a loader loads; ``None`` if they would not."""
    kind = type(loader)
    if not isinstance(loader, DataLoader):
        return f"it is a {kind.__module__}.{kind.__qualname__}, not a torch DataLoader"
    if hasattr(loader, "state_dict"):
        return f"a {kind.__qualname__} keeps its position (state_dict), which new workers would lose"
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"its dataset is iterable ({type(loader.dataset).__qualname__}) and divides itself among its workers: "
            "with another number of them it could repeat or lose samples"
        )
    if not loader.in_order:
        return "in_order=False: the order of its batches depends on the workers"
    if not hasattr(DataLoader, GET_ITERATOR):
        return f"this version of torch has no DataLoader.{GET_ITERATOR}"
    if getattr(kind, GET_ITERATOR) is not getattr(DataLoader, GET_ITERATOR):
        return f"{kind.__qualname__} has its own {GET_ITERATOR}"
    return None


def plain_loader(loader: DataLoader[Any], settings: LoaderSettings, indices: Any, **options: Any) -> DataLoader[Any]:
    """Return a plain DataLoader with other settings, which loads what the given one loads.

    ``indices`` take the place of its batch sampler, or of its sampler without one; ``options`` override its arguments.
    """
    arguments = {
        **asdict(settings),
        "collate_fn": loader.collate_fn,
        "worker_init_fn": loader.worker_init_fn,
        "timeout": loader.timeout,
        "multiprocessing_context": loader.multiprocessing_context,
        **options,
    }
    if device := getattr(loader, "pin_memory_device", ""):
        arguments["pin_memory_device"] = device
    if not settings.num_workers:  # torch refuses both then
        del arguments["timeout"], arguments["multiprocessing_context"]
    if loader.batch_sampler is None:
        arguments |= {"batch_size": None, "sampler": indices}
    else:
        arguments |= {"batch_size": 1, "batch_sampler": indices}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores: what waits can use them
        return DataLoader(loader.dataset, **arguments)


def batch_bytes(batch: Any) -> int:
    """Return the size of all tensors in a batch of nested lists, tuples and dictionaries."""
    if isinstance(batch, torch.Tensor):
        return batch.element_size() * batch.numel()
    if isinstance(batch, dict):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        return 0
    return sum(batch_bytes(part) for part in batch)


def first_tensor(batch: Any) -> torch.Tensor | None:
    """Return the first tensor in a batch of nested lists, tuples and dictionaries, if there is one."""
    while not isinstance(batch, torch.Tensor):
        if not isinstance(batch, (dict, list, tuple)) or not batch:
            return None
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch
