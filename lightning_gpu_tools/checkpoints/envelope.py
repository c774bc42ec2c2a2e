"""The types of what a checkpoint holds, as far as this package, torch and Lightning rely on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_gpu_tools.checkpoints.content import LIGHTNING_VERSION, MANIFEST, all_state_dicts
from lightning_gpu_tools.checkpoints.descriptions import MAX_DEPTH
from lightning_gpu_tools.checkpoints.formats import faults_of
from lightning_gpu_tools.errors import BrokenCheckpointError
from lightning_gpu_tools.units import printable, printable_path

# The entries that load_from_checkpoint and Trainer read beside the weights.
HYPERPARAMETERS_FORM = ("hparams_name", "hparams_type")
WITH_WEIGHTS = ("callbacks", "current_model_state", "averaging_state", "loops")
TO_RESUME = ("loops", "optimizer_states", "lr_schedulers")


def check_contents(content: Any, path: object) -> dict[str, Mapping[str, Any]]:
    """Return what ``all_state_dicts`` returns, with keys and versions of the right type."""
    with faults_of(path):
        entries = all_state_dicts(content)
    for entry, weights in entries.items():
        where = f'"{printable(entry)}" of {printable_path(path)}' if entry else printable_path(path)
        for key in weights:
            if not isinstance(key, str):
                raise BrokenCheckpointError(
                    f"{where} has weights without a name: the key {printable(key)} is of type {type(key).__name__}. "
                    "Save the state_dict of a module."
                )
            if key.count(".") > MAX_DEPTH:
                raise BrokenCheckpointError(
                    f"{where} has the key {printable(key)} of {key.count('.')} levels. No model is nested more than "
                    f"{MAX_DEPTH} levels deep."
                )
        if not are_versions(getattr(weights, "_metadata", None)):
            raise BrokenCheckpointError(
                f"{where} has wrong _metadata: torch keeps the version of each module there, as a whole number. Delete "
                "that attribute of the state_dict and save it again."
            )
    return entries


def check_entries(checkpoint: Mapping[Any, Any], path: object, names: Iterable[str]) -> None:
    """Check the types of entries of a Lightning checkpoint before they are used."""
    for name in names:
        is_right, wanted = _ENTRIES[name]
        if name in checkpoint and not is_right(checkpoint[name]):
            value = checkpoint[name]
            raise BrokenCheckpointError(
                f'"{name}" of {printable_path(path)} must be {wanted}, but is {printable(value)} of type '
                f"{type(value).__name__}. Put it right or take it out, and save the checkpoint again."
            )


def fault_in_progress(saved: Any, own: Any, name: str) -> str:
    """Return what is wrong with the saved progress of a loop that would save ``own``; ``""`` if nothing.

    Numbers may be missing: Lightning keeps its own.
    """
    if isinstance(own, Mapping):
        if not isinstance(saved, Mapping):
            return f'has {printable(saved)} for the dictionary "{name}"'
        for key, value in own.items():
            if key not in saved and type(value) is not int:
                return f'has no "{key}" in "{name}"'
            fault = key in saved and fault_in_progress(saved[key], value, f"{name}.{key}")
            if fault:
                return fault
    elif isinstance(own, int) and not isinstance(saved, int):
        return f'has {printable(repr(saved))} for the number "{name}"'
    return ""


def is_like(value: Any, own: Any) -> bool:
    """Whether a saved value can replace that of a live object; ``None`` stands for what is not there yet."""
    if value is None or own is None:
        return True
    if getattr(own, "shape", (0,)) == () or isinstance(own, (int, float)):
        return isinstance(value, (int, float)) or getattr(value, "shape", None) in ((), (1,))
    if isinstance(own, (list, tuple)):
        has_length = isinstance(value, (list, tuple)) and (len(value) == len(own) or isinstance(own, list))
        return has_length and all(map(is_like, value, own))
    if isinstance(own, Mapping):
        return isinstance(value, Mapping) and all(is_like(value[name], own[name]) for name in own if name in value)
    return isinstance(value, str) or not isinstance(own, str)


def manifest_of(content: Any) -> dict[str, Any]:
    """Return what this package has noted in a checkpoint, without what others have put there."""
    manifest = content.get(MANIFEST) if isinstance(content, Mapping) else None
    if not isinstance(manifest, Mapping):
        return {}
    return {name: manifest[name] for name, is_right in _NOTES.items() if name in manifest and is_right(manifest[name])}


def are_versions(metadata: Any) -> bool:
    """Whether this can be the ``_metadata`` of a state_dict: the version of each module."""
    return metadata is None or (
        isinstance(metadata, dict)
        and _is_named(metadata)
        and all(isinstance(entry, dict) for entry in metadata.values())
        and all(isinstance(entry.get("version"), (int, type(None))) for entry in metadata.values())
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _are_dictionaries(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, Mapping) for item in value)


def _are_loops(value: Any) -> bool:
    return value is None or (_is_named(value) and all(map(_is_loop, value.values())))


def _is_loop(value: Any) -> bool:
    return (
        _is_named(value)
        and _are_dictionaries(list(value.values()))
        and _are_dictionaries(value.get("state_dict", {}).get("combined_loader", []))
    )


# The types that Lightning reads: CheckpointConnector.dump_checkpoint
_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    LIGHTNING_VERSION: (_is_text, "text"),
    "hyper_parameters": (_is_named, "a dictionary with names for keys"),
    "hparams_name": (lambda value: value is None or _is_text(value), "text"),
    "hparams_type": (
        lambda value: value is None or _is_text(value) or (isinstance(value, type) and issubclass(value, Mapping)),
        "a class of dictionaries",
    ),
    "current_model_state": (_is_named, "a dictionary with names for keys"),  # by WeightAveraging
    "averaging_state": (_is_named, "a dictionary with names for keys"),
    "callbacks": (lambda value: value is None or isinstance(value, dict), "a dictionary"),
    "loops": (_are_loops, "a dictionary of loops, each with a dictionary for every part of its progress"),
    "optimizer_states": (_are_dictionaries, "a list of the state_dicts of optimizers"),
    "lr_schedulers": (_are_dictionaries, "a list of dictionaries"),
}
_NOTES: dict[str, Callable[[Any], bool]] = {
    "wrappers": lambda value: _is_named(value) and all(map(_is_text, value.values())),
    "devices": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "torch": _is_text,
    "lightning": _is_text,
}
