"""The settings of a DataLoader, plain loaders with other settings, and the sizes of their batches."""

import warnings
from dataclasses import asdict, fields
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_gpu_tools.memory.holdings import plain_tensors
from lightning_gpu_tools.training.run_measurements import LoaderSettings

# Private names of torch. Without the second one, workers end when their iterator is dropped.
GET_ITERATOR = "_get_iterator"
SHUT_DOWN_WORKERS = "_shutdown_workers"
_CHANNELS = (1, 3, 4)  # of images: gray, RGB, RGBA


def settings_of(loader: DataLoader[Any]) -> LoaderSettings:
    """Return the current settings of a DataLoader."""
    found: dict[str, Any] = {field.name: getattr(loader, field.name) for field in fields(LoaderSettings)}
    if found["batch_size"] is None:  # of a batch sampler given to the loader, as Lightning does for predict
        size = getattr(loader.batch_sampler, "batch_size", None)
        found["batch_size"] = size if isinstance(size, int) else None
    return LoaderSettings(**found)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return what yields the indices of a DataLoader: of batches or, without automatic batching, of samples."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def plain_loader(loader: DataLoader[Any], settings: LoaderSettings, indices: Any, **options: Any) -> DataLoader[Any]:
    """Return a plain DataLoader with other settings that loads the same data as the given one.

    ``indices`` replace its batch sampler or, without one, its sampler. ``options`` override its arguments.
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
    if not settings.num_workers:  # torch then refuses both
        del arguments["timeout"], arguments["multiprocessing_context"]
    if loader.batch_sampler is None:
        arguments |= {"batch_size": None, "sampler": indices}
    else:
        arguments |= {"batch_size": 1, "batch_sampler": indices}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: they mostly wait
        return DataLoader(loader.dataset, **arguments)


def batch_bytes(batch: Any, *, on_gpu: bool = False) -> int:
    """Return the bytes of all tensors, or of those on a GPU, in a batch of nested lists, tuples, and dictionaries."""
    tensors = (tensor for tensor in plain_tensors(batch) if tensor.is_cuda or not on_gpu)
    return sum(tensor.element_size() * tensor.numel() for tensor in tensors)


def first_tensor(batch: Any) -> torch.Tensor | None:
    """Return the first tensor in a batch of nested lists, tuples, and dictionaries, if there is one."""
    return _first_in(batch)[0]


def _first_in(batch: Any) -> tuple[torch.Tensor | None, Any]:
    """Return the first tensor in a batch, and what holds it if that is a part of the batch."""
    holder, whole = None, batch
    while not isinstance(batch, torch.Tensor):
        if not isinstance(batch, (dict, list, tuple)) or not batch:
            return None, None
        holder = None if batch is whole else batch
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch, holder


def batch_shape(batch: Any) -> tuple[int, ...] | None:
    """Return the shape of the first tensor; ``None`` also for a nested tensor, whose parts have different shapes.

    For a list of images, as in torchvision's models for detection, return their number, and the shape that holds each.
    """
    first, holder = _first_in(batch)
    if first is None or first.is_nested:
        return None
    is_list = isinstance(holder, (list, tuple)) and all(isinstance(image, torch.Tensor) for image in holder)
    if not is_list or not all(image.dim() == 3 and len(image) in _CHANNELS for image in holder):
        return tuple(first.shape)
    if any(len(image) != len(first) for image in holder):
        return None
    return (len(holder), *(max(sizes) for sizes in zip(*(image.shape for image in holder), strict=True)))
