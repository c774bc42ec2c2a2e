"""The weights in a loaded checkpoint, and what of it shares memory with the file."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from lightning_gpu_tools.checkpoints import content as contents
from lightning_gpu_tools.checkpoints.content import MODEL_STATES, describe_content
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys
from lightning_gpu_tools.checkpoints.key_tree import PathSet, Shape
from lightning_gpu_tools.checkpoints.model_keys import shape_of
from lightning_gpu_tools.errors import AmbiguousCheckpointError, CheckpointMismatchError


def find_state_dicts(content: Any) -> dict[str, Mapping[str, Any]]:
    """Return the sets of weights in a loaded checkpoint, by the name of their entry."""
    return contents.find_state_dicts(content, torch.Tensor)


def is_state_dict(value: Any) -> bool:
    """Whether this is a model's state."""
    return contents.is_state_dict(value, torch.Tensor)


def choose_weights(path: str, content: Any, entry: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the weights of an entry.

    Raises:
        CheckpointMismatchError: There is no such entry, or none at all.
        AmbiguousCheckpointError: There are several and none was named.
    """
    entries = find_state_dicts(content)
    if not entries:
        raise CheckpointMismatchError(f"{path} holds no weights but {describe_content(content)}.")
    names = ", ".join(entries)
    if entry is None and len(entries) > 1:
        raise AmbiguousCheckpointError(f"{path} holds several sets of weights: {names}. Say which one: --entry NAME.")
    chosen = next(iter(entries)) if entry is None else entry
    if chosen not in entries:
        raise CheckpointMismatchError(f"{path} has no weights called {chosen!r}; it has {names or 'only one set'}.")
    return chosen, entries[chosen]


def shapes_of(weights: Mapping[str, Any]) -> dict[str, Shape | None]:
    """Return the shape of every entry; ``None`` for what is not a tensor."""
    return {key: shape_of(value) for key, value in weights.items()}


def same_tensors(weights: Mapping[str, Any]) -> dict[str, Hashable]:
    """Return what tells whether two keys hold the very same numbers in memory."""
    return {
        key: (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        for key, value in weights.items()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel()
    }


def own_all_but_weights(content: Any) -> Any:
    """Return the content with everything copied out of the mapped file that a program may keep.

    Weights stay mapped, because loading copies them into the model. An optimizer and a callback keep what they are
    given: if that stayed mapped, writing over the file would change it under their hands.
    """
    if not isinstance(content, dict) or is_state_dict(content):
        return content
    weights = {f"{entry}": value for entry, value in find_state_dicts(content).items() if "." not in entry}
    weights.update((name, content[name]) for name in MODEL_STATES if is_state_dict(content.get(name)))
    return {name: value if name in weights else copy.deepcopy(value) for name, value in content.items()}


def own_what_modules_keep(weights: dict[str, Any], model: ModelKeys) -> None:
    """Copy those weights out of the mapped file that loading does not copy into the model.

    That is what is not a tensor but may hold some (``_extra_state``), and everything below a module with a loading
    function of its own, which may keep the tensors it is given, as torchmetrics does.
    """
    keeps = PathSet(model.self_loading)
    for key, value in weights.items():
        if not isinstance(value, torch.Tensor) or key in keeps:
            weights[key] = copy.deepcopy(value)
