"""The content of a checkpoint, described or loaded: its sets of weights, and what else it is."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from lightning_gpu_tools.checkpoints.inert_pickle import Opaque, StandIn
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.checkpoints.structure import MAX_DEPTH, Fault, TensorInfo, faults_of
from lightning_gpu_tools.errors import BrokenCheckpointError
from lightning_gpu_tools.units import printable, printable_path

Entries = Mapping[str, Mapping[str, Any]]  # sets of weights by the name of their entry

LIGHTNING_VERSION = "pytorch-lightning_version"
# Entries of a Lightning checkpoint with the model's keys. WeightAveraging adds the second one.
MODEL_STATES = ("state_dict", "current_model_state")
# Arguments of classes. Tensors in them are not weights.
_ARGUMENTS = frozenset({"hyper_parameters", "datamodule_hyper_parameters"})
_VERSION = re.compile(r"\d{1,9}(\.\d{1,9}){1,3}[\w.+-]{0,40}")
_MAX_LEVELS = 3  # "callbacks", "StochasticWeightAveraging", "average_model_state"
# Our default, ten times more than in any real model. A hostile file can hold one module in a billion places.
_MAX_PARTS = 1_000_000


def likely(entries: Entries) -> dict[str, Mapping[str, Any]]:
    """Return the entries to search if none is named: only ``state_dict`` if it exists, otherwise all."""
    return {"state_dict": entries["state_dict"]} if "state_dict" in entries else dict(entries)


def all_state_dicts(content: Any) -> dict[str, Mapping[str, Any]]:
    """Return entry name -> weights for every set of weights; the name is ``""`` if the file holds nothing else.

    A set of weights is a module, or a dictionary of tensors that is not an optimizer's state.
    """
    mapping = _as_mapping(content)
    if is_state_dict(mapping):
        return {"": mapping}
    if not is_lightning_checkpoint(content):
        return dict(_nested_state_dicts(content, "", 2))
    # Callbacks keep averages a level deeper, next to scores and counters.
    found = _nested_state_dicts(content, "", _MAX_LEVELS)
    return {"state_dict": content["state_dict"]} | {
        name: weights for name, weights in found if _has_more_than_numbers(weights)
    }


def check_contents(content: Any, path: object) -> dict[str, Mapping[str, Any]]:
    """Return the result of ``all_state_dicts``; raise if keys or versions have a wrong type."""
    with faults_of(path):
        entries = all_state_dicts(content)
    for entry, weights in entries.items():
        fault = ""
        for key in weights:
            if not isinstance(key, str) or key.count(".") > MAX_DEPTH:
                fault = f"an invalid key for a weight: {describe_content(key)}"
        metadata = getattr(weights, "_metadata", None)
        if metadata is not None:
            modules = metadata.values() if isinstance(metadata, dict) and is_named(metadata) else [None]
            if not all(isinstance(m, dict) and isinstance(m.get("version"), (int, type(None))) for m in modules):
                fault = "invalid _metadata"
        if fault:
            where = f'"{printable(entry)}" of {printable_path(path)}' if entry else printable_path(path)
            raise BrokenCheckpointError(f"{where} has {fault}. Save the state_dict of a module.")
    return entries


def check_training_state(content: Any, path: object) -> None:
    """Raise if an entry of a Lightning checkpoint is of another type than Lightning writes, so that loading fails."""
    for name, fits in _RESTORED.items() if is_lightning_checkpoint(content) else ():
        if name in content and not (isinstance(content[name], Opaque) or fits(content[name])):  # only its class knows
            raise BrokenCheckpointError(
                f"{printable_path(path)} cannot be resumed: its {name} is {describe_content(content[name])}, which no "
                "Trainer writes. Use an earlier checkpoint, or load its weights with lightning_gpu_tools.load_weights."
            )


def is_named(value: Any) -> bool:
    """Return whether this is a dictionary with string keys."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


# Entries that a Trainer restores, and whether a value can be restored.
_RESTORED: Mapping[str, Callable[[Any], object]] = {
    LIGHTNING_VERSION: lambda value: isinstance(value, str) and _VERSION.fullmatch(value),
    "hyper_parameters": is_named,
    **dict.fromkeys(
        ("callbacks", "loops", "current_model_state", "averaging_state"),
        lambda value: isinstance(value, (Mapping, type(None))),
    ),
    **dict.fromkeys(
        ("optimizer_states", "lr_schedulers"),
        lambda states: isinstance(states, list) and all(isinstance(state, (Mapping, Opaque)) for state in states),
    ),
}


def is_state_dict(value: Any) -> bool:
    """Return whether this maps names to tensors, except for extra states and settings of quantized modules."""
    if not is_named(value):
        return False
    if hasattr(value, "_metadata"):  # set by torch
        return bool(value)
    torch = sys.modules.get("torch")  # without it, no tensor has been loaded
    kinds = (TensorInfo,) if torch is None else (TensorInfo, torch.Tensor)
    tensors = 0
    for key, item in value.items():
        if isinstance(item, kinds):
            tensors += 1
        elif isinstance(item, Mapping) and not key.endswith("_extra_state"):
            return False
    return tensors > 0 and 2 * tensors >= len(value)


def is_lightning_checkpoint(content: Any) -> bool:
    """Return whether this is a checkpoint as written by ``Trainer.save_checkpoint``."""
    return (
        isinstance(content, Mapping) and LIGHTNING_VERSION in content and isinstance(content.get("state_dict"), Mapping)
    )


def put_weights(content: Any, entries: Entries, name: str = "") -> Any:
    """Return the content at ``name`` in a file with its sets of weights replaced by those in ``entries``."""
    if name in entries:
        return entries[name]
    if not any(not name or entry.startswith(f"{name}.") for entry in entries):
        return content
    return {
        key: put_weights(item, entries, f"{name}.{key}" if name else key) if isinstance(key, str) else item
        for key, item in _as_mapping(content).items()
    }


def describe_content(content: Any) -> str:
    """Return a short description of this value, with an article."""
    if isinstance(content, Mapping):
        if "param_groups" in content and "state" in content:
            return "the state of an optimizer"
        return f"a dictionary with {listed([*content], 8)}" if content else "an empty dictionary"
    if hasattr(content, "shape") and hasattr(content, "dtype"):
        return f"a tensor ({shown_shape(content.shape or ())}, {printable(str(content.dtype).removeprefix('torch.'))})"
    if isinstance(content, (list, tuple)):
        return f"a {'list' if isinstance(content, list) else 'tuple'} of {len(content)}"
    if isinstance(content, str):
        return f'the text "{printable(content)}"'
    if isinstance(content, (bool, int, float, type(None), StandIn)):
        return f"the value {printable(content)}"
    kind = content.kind or "an unknown class" if isinstance(content, Opaque) else type(content).__name__
    return f"an object of {printable(kind)}"


def parts_of(content: Any) -> Iterator[Any]:
    """Yield a value and everything in it, also the states of objects."""
    seen: set[int] = set()
    stack = [content]
    while stack:
        part = stack.pop()
        yield part
        if isinstance(part, (Mapping, list, tuple, Opaque)) and id(part) not in seen:
            seen.add(id(part))
            if isinstance(part, Opaque):
                stack += part.state, part.items
            else:
                stack += [*part, *part.values()] if isinstance(part, Mapping) else part


def unopened_objects(content: Any) -> set[str]:
    """Return the builders, as ``"module.name"``, of all objects that only running code could build."""
    parts = [part for part in parts_of(content) if isinstance(part, (Opaque, StandIn)) and not part.is_plain]
    return {str(part) if isinstance(part, StandIn) else part.kind or "an unknown class" for part in parts}


def shown_shape(shape: Iterable[int]) -> str:
    """Format a shape as ``3x4``, or as ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


def _as_mapping(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Opaque):
        return _weights_of(value) if _is_module(value) else value.items or {}
    if hasattr(type(value), "named_parameters"):  # a live module, from a trusted file
        return cast(Mapping[Any, Any], value.state_dict())
    return {}


def _is_module(value: Any) -> bool:
    state = value.state if isinstance(value, Opaque) else None
    parts = ("_modules", "_parameters", "_buffers")
    return isinstance(state, Mapping) and all(isinstance(state.get(part), Mapping) for part in parts)


def _weights_of(module: Opaque) -> dict[str, Any]:
    """Return the ``state_dict()`` of a described module."""
    weights: dict[str, Any] = {}
    modules = 0
    stack = [("", module)]
    while stack:
        prefix, one = stack.pop()
        modules += 1
        if modules + len(weights) > _MAX_PARTS or prefix.count(".") > MAX_DEPTH:
            raise Fault(
                f"holds a module with more than {MAX_DEPTH} levels, too many parts, or endless recursion",
                "This is not a real model.",
            )
        unsaved = one.state.get("_non_persistent_buffers_set")
        not_saved = {name for name in unsaved if isinstance(name, str)} if isinstance(unsaved, (list, tuple)) else ()
        parts = {**one.state["_parameters"], **one.state["_buffers"], **one.state["_modules"]}
        children = [(f"{prefix}{name}.", part) for name, part in parts.items() if _is_module(part)]
        for name, part in parts.items():
            if part is None or name in not_saved or _is_module(part):
                continue
            if not isinstance(part, TensorInfo):
                part = TensorInfo("?", None, None, kind=getattr(part, "kind", "") or "unknown")
            weights[f"{prefix}{name}"] = part
        stack += reversed(children)
    return weights


def _nested_state_dicts(content: Any, path: str, levels: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the sets of weights that are at most this number of dictionaries deep."""
    prefix = f"{path}." if path else ""
    for name, value in _as_mapping(content).items():
        mapping = _as_mapping(value)
        if not isinstance(name, str) or name in _ARGUMENTS or "param_groups" in mapping:
            continue
        if is_state_dict(mapping):
            yield prefix + name, mapping
        elif levels > 1:
            yield from _nested_state_dicts(value, prefix + name, levels - 1)


def _has_more_than_numbers(weights: Mapping[str, Any]) -> bool:
    return any(getattr(item, "shape", ()) != () for item in weights.values())
