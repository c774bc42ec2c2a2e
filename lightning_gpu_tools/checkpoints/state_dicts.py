"""The weights in a loaded checkpoint, and what of it shares memory with the file."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from lightning_gpu_tools.checkpoints import content as contents
from lightning_gpu_tools.checkpoints.content import MODEL_STATES, describe_content
from lightning_gpu_tools.checkpoints.envelope import check_contents
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys
from lightning_gpu_tools.checkpoints.key_tree import PathSet, Shape
from lightning_gpu_tools.checkpoints.model_keys import shape_of
from lightning_gpu_tools.checkpoints.rename_plan import RenamePlan
from lightning_gpu_tools.errors import AmbiguousCheckpointError, CheckpointError, CheckpointMismatchError
from lightning_gpu_tools.units import format_bytes, printable, printable_path


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
    """Check the contents of a file, and return the name and the weights of an entry.

    Raises:
        BrokenCheckpointError: Nothing can work with these contents.
        CheckpointMismatchError: There is no such entry, or none at all.
        AmbiguousCheckpointError: There are several and none was named.
    """
    entries = check_contents(content, path, torch.Tensor)
    if entry is None:
        entries = contents.likely(entries)
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
    """Return what tells whether two keys hold the very same numbers in memory, for keys that may."""
    places = {
        key: value.data_ptr()
        for key, value in weights.items()
        if shape_of(value) is not None and value.layout is torch.strided and value.numel()
    }
    keys_at = Counter(places.values())
    shared = ((key, weights[key]) for key, place in places.items() if keys_at[place] > 1)
    return {
        key: (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.is_conj(), value.is_neg())
        for key, value in shared
    }


# Beyond what a file holds. Our default: one float32 mask of 16,384 x 16,384, or as much again as the file holds.
_MAX_REPEATED_BYTES = 1 << 30


def check_repetition(path: str, weights: Mapping[str, Any], dtype: torch.dtype | None = None) -> None:
    """Refuse weights that take far more memory number by number than the file holds.

    A tensor may repeat its numbers (``expand``), share them with other keys, or leave out zeros (sparse), so a file of
    1 KiB can describe 256 GiB.

    Args:
        path: The file; used in the error.
        weights: Those whose numbers are about to be written or compared one by one.
        dtype: What floating-point weights become; ``None`` leaves them.

    Raises:
        CheckpointError: They take 1 GiB more than what is in the file, and more than twice that.
    """

    def item_bytes(value: torch.Tensor) -> int:
        return dtype.itemsize if dtype is not None and value.is_floating_point() else value.element_size()

    sizes = {
        key: value.numel() * item_bytes(value)
        for key, value in weights.items()
        if shape_of(value) is not None and not value.is_meta
    }
    if sum(sizes.values()) <= _MAX_REPEATED_BYTES:
        return
    identity = same_tensors(weights)
    needed = {identity.get(key, key): (size, key) for key, size in sizes.items()}
    held: dict[int, int] = {}
    for value in (weights[key] for key in sizes):
        if value.layout is torch.strided:
            storage = value.untyped_storage()
            bytes_there = storage.nbytes() // value.element_size() * item_bytes(value)
            held[storage.data_ptr()] = max(bytes_there, held.get(storage.data_ptr(), 0))
    needed_bytes, held_bytes = sum(size for size, _ in needed.values()), sum(held.values())
    if needed_bytes - held_bytes > max(held_bytes, _MAX_REPEATED_BYTES):
        _, largest = max(needed.values())
        raise CheckpointError(
            f"{printable_path(path)} holds {format_bytes(held_bytes)} of numbers, but repeats them: its weights would "
            f'take {format_bytes(needed_bytes)}. The largest is "{printable(largest)}" of shape '
            f"{tuple(weights[largest].shape)}. Take out what is not needed, or convert it to .pt without --dtype."
        )


def rename_optimizers(states: Any, plan: RenamePlan) -> Any:
    """Rename the parameters in optimizer states that go by name; most go by number and stay."""
    rename = plan.rename_key()

    def renamed(name: Any) -> Any:
        return rename(name) if isinstance(name, str) else name

    def one(state: Any) -> Any:
        if not _goes_by_name(state):
            return state
        return {
            **state,
            "state": {renamed(name): value for name, value in state["state"].items()},
            "param_groups": [
                {**group, "params": [renamed(name) for name in group["params"]]} for group in state["param_groups"]
            ],
        }

    return [one(state) for state in states] if isinstance(states, list) else states


def _goes_by_name(state: Any) -> bool:
    """Whether this is the state of one of torch's optimizers, with names in place of the usual numbers."""
    match state:
        case {"state": dict(state_of), "param_groups": list(groups)}:
            return any(isinstance(name, str) for name in state_of) and all(
                isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
            )
    return False


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
        if not isinstance(value, torch.Tensor):
            weights[key] = copy.deepcopy(value)
        elif key in keeps:  # a deep copy of a plain tensor is one of its whole storage, with all others in it
            weights[key] = value.detach().clone() if type(value) is torch.Tensor else copy.deepcopy(value)


def refuse_what_torch_cannot_copy(
    weights: Mapping[str, Any], plan: RenamePlan, keys: ModelKeys, state: Mapping[str, Any]
) -> None:
    """Refuse weights of a kind that ``load_state_dict`` would fail on after it has copied others.

    Args:
        weights: Of the checkpoint.
        plan: Their new names.
        keys: What is known of the model.
        state: Its ``state_dict()``.

    Raises:
        CheckpointMismatchError: They are no tensors, or have another layout than those of the model.
    """
    converted = PathSet(keys.self_loading)
    refused = [
        f"{printable(old)} ({_kind(weights[old])} instead of {_kind(state[new])})"
        for old, new in plan.renames.items()
        if shape_of(state[new]) is not None and new not in converted and not _can_copy(weights[old], state[new])
    ]
    if refused:
        more = f", … and {len(refused) - 4} more" * (len(refused) > 4)
        raise CheckpointMismatchError(
            f"Torch cannot copy {', '.join(refused[:4])}{more}. Nothing was changed. Store them as the model has them, "
            "or take them out of the file and load it with strict=False."
        )


def _can_copy(value: Any, target: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is target.layout
        and value.is_nested == target.is_nested
        and value.is_meta <= target.is_meta
        and value.is_quantized <= target.is_quantized
        and (not _is_one_part(value) or hasattr(target, "device_mesh"))
    )


def _is_one_part(value: Any) -> bool:
    """Whether this is a part of a sharded tensor, and nobody is there who has the others."""
    if type(value) is torch.Tensor or not hasattr(value, "device_mesh") or value.device_mesh.size() == 1:
        return False
    return not torch.distributed.is_initialized()


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {printable(type(value).__name__)}"
    layout = "nested" if value.is_nested else "meta" if value.is_meta else str(value.layout).removeprefix("torch.")
    return f"a {'part of a ' * _is_one_part(value)}{'quantized ' * value.is_quantized}{layout} tensor"
