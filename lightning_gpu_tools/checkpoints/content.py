"""The content of a checkpoint, described or loaded: its sets of weights, and what else it is."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lightning_gpu_tools.checkpoints.inert_pickle import Opaque, StandIn
from lightning_gpu_tools.checkpoints.key_tree import MAX_NAME, listed
from lightning_gpu_tools.checkpoints.structure import MAX_DEPTH, Fault, TensorInfo, faults_of
from lightning_gpu_tools.errors import BrokenCheckpointError
from lightning_gpu_tools.units import printable, printable_path

Entries = Mapping[str, Mapping[str, Any]]  # sets of weights by the name of their entry

LIGHTNING_VERSION = "pytorch-lightning_version"
# Entries of a Lightning checkpoint with the model's keys. WeightAveraging adds the second one.
MODEL_STATES = ("state_dict", "current_model_state")
_VERSION = re.compile(r"\d{1,9}(\.\d{1,9}){1,3}[\w.+-]{0,40}")
# Arguments of classes. Tensors in them are not weights.
_ARGUMENTS = frozenset({"hyper_parameters", "datamodule_hyper_parameters"})
_MAX_LEVELS = 3  # "callbacks", "StochasticWeightAveraging", "average_model_state"
_MAX_LISTS = 2  # our default: pairs of a number and a set of weights, or lists of such sets
_MAX_ITEMS = 1000  # of a list, our default: longer ones hold data
# Our default, ten times more than in any real model. A hostile file can hold one module in a billion places.
_MAX_PARTS = 1_000_000
# What a pickle builds NumPy arrays by.
_ARRAY = re.compile(r"numpy\.(_core|core)\.(multiarray\._reconstruct|numeric\._frombuffer)")
_SCRIPT = "__torch__."  # begins the class of an object of a TorchScript program
_QUANTIZED_MODULES = ("torch.ao.nn.", "torch.nn.quantized.", "torch.nn.intrinsic.quantized.")


def likely(entries: Entries) -> dict[str, Mapping[str, Any]]:
    """Return the entries to search if none is named: only ``state_dict`` if it exists, otherwise all."""
    return {"state_dict": entries["state_dict"]} if "state_dict" in entries else dict(entries)


def all_state_dicts(content: Any) -> dict[str, Mapping[str, Any]]:
    """Return entry name -> weights for every set of weights; the name is ``""`` if the file holds nothing else.

    A set of weights is a module, or a dictionary of tensors that is not an optimizer's state. In the names of entries,
    ``[0]`` is the first item of a list or tuple.
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
        where = f'"{printable(entry)}" of {printable_path(path)}' if entry else printable_path(path)
        odd = [key for key in weights if not isinstance(key, str) or key.count(".") > MAX_DEPTH]
        if odd:
            raise BrokenCheckpointError(
                f"{where} has an invalid key for a weight: {describe_content(odd[0])}. Save the state_dict of a module."
            )
        metadata = getattr(weights, "_metadata", {})
        modules = metadata.values() if isinstance(metadata, dict) and is_named(metadata) else [None]
        are_versions = all(isinstance(m, dict) and isinstance(m.get("version"), (int, type(None))) for m in modules)
        if metadata is not None and not are_versions:
            raise BrokenCheckpointError(
                f"{where} has invalid _metadata, which must map each module to an integer version. Delete this "
                "attribute of the state_dict, and save it again."
            )
    return entries


def check_training_state(content: Any, path: object) -> None:
    """Raise if an entry of a Lightning checkpoint is not what Lightning writes, so that it cannot be restored."""
    for name, (expected, fits) in _RESTORED.items() if is_lightning_checkpoint(content) else ():
        if name in content and not (isinstance(content[name], Opaque) or fits(content[name])):  # only its class knows
            raise BrokenCheckpointError(
                f"{printable_path(path)} cannot be resumed: its {name} is {describe_content(content[name])}, not "
                f"{expected}. Use an earlier checkpoint, or load its weights with lightning_gpu_tools.load_weights."
            )


def is_named(value: Any) -> bool:
    """Return whether this is a dictionary with string keys."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _is_version(value: Any) -> bool:
    return isinstance(value, str) and _VERSION.fullmatch(value) is not None


def _are_loops(value: Any) -> bool:
    names = {"fit_loop", "validate_loop", "test_loop", "predict_loop"}
    return value is None or (isinstance(value, Mapping) and names <= value.keys())


def _is_dictionary(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _are_dictionaries(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, (Mapping, Opaque)) for item in value)


# Entries that a Trainer restores, what they are, and whether a value can be restored.
_RESTORED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    LIGHTNING_VERSION: ("a version such as 2.6.0", _is_version),
    "hyper_parameters": ("a dictionary with string keys", is_named),
    "loops": ("a dictionary with the loops of a Trainer", _are_loops),
    **dict.fromkeys(("callbacks", "current_model_state", "averaging_state"), ("a dictionary", _is_dictionary)),
    **dict.fromkeys(("optimizer_states", "lr_schedulers"), ("a list of dictionaries", _are_dictionaries)),
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
    if not any(not name or entry.startswith((f"{name}.", f"{name}[")) for entry in entries):
        return content
    if isinstance(content, (list, tuple)):
        items = [put_weights(item, entries, f"{name}[{i}]") for i, item in enumerate(content)]
        return items if isinstance(content, list) else tuple(items)
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


def place_of(content: Any, fits: Callable[[Any], bool]) -> str | None:
    """Return the place of the first part that fits, in Python: ``["a"][0]``, or ``""`` for the whole content."""
    seen = set[int]()
    queue = deque([("", content)])
    while queue:
        place, part = queue.popleft()
        if fits(part):
            return place
        if id(part) in seen or len(seen) >= _MAX_PARTS or len(place) >= MAX_NAME:
            continue
        seen.add(id(part))
        if isinstance(part, Mapping) and "param_groups" not in part:
            inner = [(key, item) for key, item in part.items() if isinstance(key, (str, int)) and key not in _ARGUMENTS]
        else:
            inner = [*enumerate(part)] if isinstance(part, (list, tuple)) else []
        queue += [(f"{place}[{key!r}]", item) for key, item in inner if isinstance(item, (Mapping, list, tuple))]
    return None


def are_weights(part: Any) -> bool:
    """Return whether these are tensors with names."""
    return is_state_dict(part) and _has_more_than_numbers(part)


def are_arrays(part: Any) -> bool:
    """Return whether these are NumPy arrays with names, opened or not."""
    numpy = sys.modules.get("numpy")  # without it, no array has been opened
    return (
        is_named(part)
        and bool(part)
        and all(
            _ARRAY.fullmatch(value.kind) if isinstance(value, Opaque) else numpy and isinstance(value, numpy.ndarray)
            for value in part.values()
        )
    )


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
        weights: Mapping[Any, Any] = value.state_dict()
        return weights
    return {}


def _is_module(value: Any) -> bool:
    state = value.state if isinstance(value, Opaque) else None
    parts = ("_modules", "_parameters", "_buffers")
    return isinstance(state, Mapping) and (
        value.kind.startswith(_SCRIPT) or all(isinstance(state.get(p), Mapping) for p in parts)
    )


def _weights_of(module: Opaque) -> dict[str, Any]:
    """Return the ``state_dict()`` of a described module. Packed weights become tensors without numbers."""
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
        if one.kind.startswith(_SCRIPT):
            parts = {name: part for name, part in one.state.items() if isinstance(part, TensorInfo) or _is_module(part)}
        else:
            parts = {**one.state["_parameters"], **one.state["_buffers"], **one.state["_modules"]}
        children = [(f"{prefix}{name}.", part) for name, part in parts.items() if _is_module(part)]
        if one.kind.startswith(_QUANTIZED_MODULES):
            parts["weight"] = TensorInfo("?", None, None, kind=one.kind)  # packed
        for name, part in parts.items():
            if part is None or name in not_saved or _is_module(part):
                continue
            if not isinstance(part, TensorInfo):
                part = TensorInfo("?", None, None, kind=getattr(part, "kind", "") or "unknown")
            weights[f"{prefix}{name}"] = part
        stack += reversed(children)
    return weights


def _nested_state_dicts(
    content: Any, path: str, levels: int, lists: int = _MAX_LISTS
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the sets of weights that are at most this number of dictionaries and of lists deep."""
    is_list = isinstance(content, (list, tuple))
    if is_list:
        lists -= 1
        named = ((f"{path}[{i}]", item) for i, item in enumerate(content) if len(content) <= _MAX_ITEMS)
    else:
        levels -= 1
        prefix = f"{path}." if path else ""
        named = (
            (prefix + name, item)
            for name, item in _as_mapping(content).items()
            if isinstance(name, str) and name not in _ARGUMENTS
        )
    for name, value in named:
        mapping = _as_mapping(value)
        if "param_groups" in mapping:
            continue
        if is_state_dict(mapping):
            if not is_list or _has_more_than_numbers(mapping):  # a list may hold the scores of all epochs
                yield name, mapping
        elif (lists if isinstance(value, (list, tuple)) else levels) > 0:
            yield from _nested_state_dicts(value, name, levels, lists)


def _has_more_than_numbers(weights: Mapping[str, Any]) -> bool:
    return any(getattr(item, "shape", ()) != () for item in weights.values())
