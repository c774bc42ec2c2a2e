"""Where the weights are in what a checkpoint file holds, and what of it shares memory with the file."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from lightning_gpu_tools.key_renaming import ModelKeys
from lightning_gpu_tools.key_tree import PathSet, Shape
from lightning_gpu_tools.model_keys import shape_of

LIGHTNING_VERSION = "pytorch-lightning_version"
# Entries of a Lightning checkpoint whose keys are the model's: WeightAveraging adds the second.
MODEL_STATES = ("state_dict", "current_model_state")


def find_state_dicts(content: Any) -> dict[str, Mapping[str, Any]]:
    """Return the sets of weights in a checkpoint's content, by the name of their entry; ``""`` for the content itself.

    A ``state_dict`` entry is meant whenever there is one. Otherwise every dictionary of tensors counts, except an
    optimizer's state.
    """
    if not isinstance(content, Mapping):
        return {}
    if is_state_dict(content.get("state_dict")):
        return {"state_dict": content["state_dict"]}
    if is_state_dict(content):
        return {"": content}
    return dict(_nested_state_dicts(content, "", depth=2))


def is_state_dict(value: Any) -> bool:
    """Whether this is a model's state: tensors by name, apart from extra states and settings of quantised modules."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    if hasattr(value, "_metadata"):  # torch puts it there and keeps it in the file
        return bool(value)
    tensors = sum(isinstance(item, torch.Tensor) for item in value.values())
    nested = any(isinstance(item, Mapping) for key, item in value.items() if not key.endswith("_extra_state"))
    return tensors > 0 and not nested and 2 * tensors >= len(value)


def is_lightning_checkpoint(content: Any) -> bool:
    """Whether this is what ``Trainer.save_checkpoint`` writes."""
    return (
        isinstance(content, Mapping) and LIGHTNING_VERSION in content and isinstance(content.get("state_dict"), Mapping)
    )


def describe_content(content: Any) -> str:
    """Say what a file holds that holds no weights."""
    if isinstance(content, Mapping):
        names = [str(name) for name in content]
        return f"a dictionary with {', '.join(names[:8])}" if names else "an empty dictionary"
    return f"a {type(content).__name__}"


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


def _nested_state_dicts(content: Mapping[str, Any], path: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in content.items():
        if not isinstance(value, Mapping) or not isinstance(name, str) or "param_groups" in value:  # an optimizer's
            continue
        if is_state_dict(value):
            yield path + name, value
        elif depth > 1:
            yield from _nested_state_dicts(value, f"{path}{name}.", depth - 1)
