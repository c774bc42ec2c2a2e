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
from lightning_gpu_tools.checkpoints.rename_plan import RenamePlan
from lightning_gpu_tools.errors import AmbiguousCheckpointError, CheckpointMismatchError
from lightning_gpu_tools.quantities import printable, printable_path


def find_state_dicts(content: Any) -> dict[str, Mapping[str, Any]]:
    """Return the sets of weights that a loaded checkpoint may be loaded for, by the name of their entry."""
    return contents.find_state_dicts(content, torch.Tensor)


def all_state_dicts(content: Any) -> dict[str, Mapping[str, Any]]:
    """Return every set of weights in a loaded checkpoint, by the name of their entry."""
    return contents.all_state_dicts(content, torch.Tensor)


def is_state_dict(value: Any) -> bool:
    """Whether this is a model's state."""
    return contents.is_state_dict(value, torch.Tensor)


def choose_weights(path: str, content: Any, entry: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the weights of an entry.

    Raises:
        CheckpointMismatchError: There is no such entry, or none at all.
        AmbiguousCheckpointError: There are several and none was named.
    """
    entries = find_state_dicts(content) if entry is None else all_state_dicts(content)
    if not entries:
        raise CheckpointMismatchError(f"{printable_path(path)} holds no weights but {describe_content(content)}.")
    names = ", ".join(map(printable, entries))
    shown = printable_path(path)
    if entry is None and len(entries) > 1:
        raise AmbiguousCheckpointError(
            f"{shown} holds several sets of weights: {names}. Choose one with: lightning-gpu-tools checkpoint convert "
            f"{shown} TARGET --entry NAME"
        )
    chosen = next(iter(entries)) if entry is None else entry
    if chosen not in entries:
        raise CheckpointMismatchError(
            f"{shown} has no weights called {printable(repr(chosen))}; it has {names or 'only one set'}."
        )
    return chosen, entries[chosen]


def shapes_of(weights: Mapping[str, Any]) -> dict[str, Shape | None]:
    """Return the shape of every entry; ``None`` for what is not a tensor."""
    return {key: shape_of(value) for key, value in weights.items()}


def same_tensors(weights: Mapping[str, Any]) -> dict[str, Hashable]:
    """Return what tells whether two keys hold the very same numbers in memory."""
    return {
        key: (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.is_conj(), value.is_neg())
        for key, value in weights.items()
        if shape_of(value) is not None and value.layout is torch.strided and value.numel()
    }


def rename_optimizers(states: Any, plan: RenamePlan) -> Any:
    """Rename the parameters in optimizer states that go by name; most go by number and stay."""
    rename = plan.rename_key()

    def renamed(name: Any) -> Any:
        return rename(name) if isinstance(name, str) else name

    def one(state: Any) -> Any:
        if not isinstance(state, Mapping) or not any(isinstance(name, str) for name in state.get("state", ())):
            return state
        return {
            **state,
            "state": {renamed(name): value for name, value in state["state"].items()},
            "param_groups": [
                {**group, "params": [renamed(name) for name in group["params"]]} for group in state["param_groups"]
            ],
        }

    return [one(state) for state in states] if isinstance(states, list) else states


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
