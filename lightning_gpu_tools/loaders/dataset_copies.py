"""The dataset as other processes should get it: without the files that this process has opened for itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

# What workers may well share with this process. Anything else that turns up in a dataset while it is used (a file, a
# database, a connection) belongs to the process that made it: two that read from one file move each other's position.
_PLAIN = (int, float, complex, str, bytes, bool, list, tuple, dict, set, torch.Tensor)


class DatasetCopies:
    """Makes copies of a dataset, and of those that it wraps, that share its samples but not what it opened in use.

    Many datasets open their file at the first sample, so that each worker has one of its own. A worker that is forked
    after that sample has been loaded in this process would find the file open and share it. In a copy everything is
    again ``None`` or absent that was so at first and has become something else than plain data.

    Args:
        dataset: Not used yet.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._first = {id(layer): dict(vars(layer)) for layer in _layers(dataset)}

    def make(self) -> Any:
        """Return a copy; the dataset itself, if it cannot be copied."""
        try:
            return self._copied(self._dataset)
        except Exception:  # noqa: BLE001 - anybody's class, which may do anything when it is copied
            return self._dataset

    def signature(self) -> tuple[Any, ...]:
        """Return what changes when somebody sets an attribute of the dataset: copies made before do not learn of it."""
        return tuple(
            (name, value if isinstance(value, (int, float, str)) else id(value))
            for layer in _layers(self._dataset)
            for name, value in vars(layer).items()
        )

    def _copied(self, layer: Any) -> Any:
        if not hasattr(layer, "__dict__"):
            return layer
        own, first = copy.copy(layer), self._first.get(id(layer), {})
        for name, value in list(vars(layer).items()):
            if name == "dataset":
                vars(own)[name] = self._copied(value)
            elif name == "datasets" and isinstance(value, list):
                vars(own)[name] = [self._copied(one) for one in value]
            elif first.get(name) is None and value is not None and not isinstance(value, _PLAIN):
                vars(own).pop(name, None)
                if name in first:
                    vars(own)[name] = None
        return own


def _layers(dataset: Any) -> Iterator[Any]:
    """Return a dataset and those that it wraps, as torch's Subset and ConcatDataset hold them."""
    if not hasattr(dataset, "__dict__"):
        return
    yield dataset
    many = vars(dataset).get("datasets")
    for inner in (vars(dataset).get("dataset"), *(many if isinstance(many, list) else ())):
        yield from _layers(inner)
