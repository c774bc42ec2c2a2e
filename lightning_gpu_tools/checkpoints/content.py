"""The description of a checkpoint before loading: tensors, objects, and the location of the weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_gpu_tools.checkpoints.faults import Fault
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.checkpoints.unsafe_globals import beyond_plain_data
from lightning_gpu_tools.units import printable

BYTES_OF_DTYPE = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32", "complex32", "bcomplex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "qint8", "quint8", "quint4x2", "quint2x4", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("bit", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    "complex128": 16,
}
DTYPE_OF_STORAGE = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
# Python's recursion limit is 1,000, and copying takes three calls per level.
MAX_DEPTH = 200


# Not frozen: that takes three times as long, and a file may describe 300,000 of them.
@dataclass(slots=True, unsafe_hash=True)
class StorageInfo:
    """A block of numbers in the file."""

    key: str
    dtype: str  # as torch prints it, without "torch."
    location: str  # device it was saved from: "cuda:2"
    numel: int

    @property
    def size_bytes(self) -> int:
        """The size, according to the description."""
        return self.numel * BYTES_OF_DTYPE[self.dtype]


@dataclass(slots=True, unsafe_hash=True)
class TensorInfo:
    """A tensor as described in the file."""

    dtype: str  # "?" if unknown
    shape: tuple[int, ...] | None  # None if unknown
    storage: StorageInfo | None  # None if the numbers are not one block
    attributes: Any = field(default=None, compare=False)  # attached by a program
    offset: int = 0  # of the first number in the storage
    strides: tuple[int, ...] | None = None  # None if it is contiguous
    kind: str = ""  # "sparse", "quantized", the name of a subclass, ...; "" for plain numbers
    is_parameter: bool = field(default=False, compare=False)  # or requires gradients, or has attributes


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor, stored in one of the files."""

    file: str
    start: int  # offset of the first number in the file, in bytes
    offsets: tuple[int, ...]  # in the tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in the file, in elements


@dataclass(slots=True, unsafe_hash=True)
class SplitTensorInfo(TensorInfo):
    """A tensor whose numbers are stored in several places."""

    laid_out: tuple[int, ...] = ()  # the shape that the parts fill: the tensor's own, or a flat one
    parts: tuple[Part, ...] = ()  # empty until they are looked up


@dataclass(eq=False, repr=False, slots=True)
class Opaque:
    """An inert placeholder for an object that only running code could build."""

    is_plain: bool = False  # whether weights_only=True would build it
    kind: str = ""  # class or function that would build it, "module.name"; "" if unknown
    state: Any = ()  # state that it would get, or arguments of the call that would build it
    items: dict[Any, Any] | None = None  # items that it would get


class StandIn:
    """A placeholder for a class, a function or a constant; ``str()`` returns the name."""

    __slots__ = ("is_plain", "module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.is_plain = not beyond_plain_data([f"{module}.{name}"])

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def are_sizes(numbers: Sequence[Any]) -> bool:
    """Return whether these are valid sizes, offsets or strides: non-negative integers below 2 ** 63."""
    return not numbers or ({*map(type, numbers)} == {int} and min(numbers) >= 0 and max(numbers) < 2**63)


LIGHTNING_VERSION = "pytorch-lightning_version"
# The entry that PortableCheckpointIO adds to a Lightning checkpoint: primitives only, for weights_only=True.
MANIFEST = "lightning_gpu_tools"
# Entries of a Lightning checkpoint with the model's keys. WeightAveraging adds the second one.
MODEL_STATES = ("state_dict", "current_model_state")
# Arguments of classes. Tensors in them are not weights.
_ARGUMENTS = frozenset({"hyper_parameters", "datamodule_hyper_parameters"})
_MAX_LEVELS = 3  # "callbacks", "StochasticWeightAveraging", "average_model_state"
# Our default, ten times more than in any real model. A hostile file can hold one module in a billion places.
_MAX_PARTS = 1_000_000
_QUANTIZED_MODULES = ("torch.ao.nn.", "torch.nn.quantized.", "torch.nn.intrinsic.quantized.")


def likely(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
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
        return dict(_nested_state_dicts(mapping, "", 2))
    # Callbacks keep averages a level deeper, next to scores and counters.
    found = _nested_state_dicts(mapping, "", _MAX_LEVELS)
    return {"state_dict": content["state_dict"]} | {
        name: weights for name, weights in found if any(getattr(item, "shape", ()) != () for item in weights.values())
    }


def is_state_dict(value: Any) -> bool:
    """Return whether this maps names to tensors, except for extra states and settings of quantized modules."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
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


def put_weights(
    content: Any, entries: Mapping[str, Mapping[str, Any]], name: str = "", depth: int = _MAX_LEVELS
) -> Any:
    """Return the content with its sets of weights replaced by those in ``entries``."""
    mapping = _as_mapping(content)
    if name in entries or depth == 0 or not mapping:
        return entries.get(name, content)
    return {
        key: put_weights(item, entries, f"{name}.{key}" if name else key, depth - 1) if isinstance(key, str) else item
        for key, item in mapping.items()
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
        if not content:
            return "an empty list"
        has_first = not isinstance(content[0], (list, tuple))
        return f"a list of {len(content)}" + (f", first {describe_content(content[0])}" if has_first else "")
    if isinstance(content, Opaque):
        is_optimizer = isinstance(content.state, Mapping) and {"state", "param_groups"} <= content.state.keys()
        what = "a module" if _is_module(content) else "an optimizer" if is_optimizer else "an object"
        return f"{what} of {printable(content.kind or 'an unknown class')}"
    if isinstance(content, StandIn):
        return f"the class or function {printable(content)}"
    if isinstance(content, str):
        return f'the text "{printable(content)}"'
    if content is None or isinstance(content, (bool, int, float)):
        return f"the value {printable(content)}"
    return f"an object of {printable(type(content).__name__)}"


def unopened_objects(content: Any) -> set[str]:
    """Return the builders, as ``"module.name"``, of all objects that only running code could build."""
    found: set[str] = set()
    seen: set[int] = set()
    stack = [content]
    while stack:
        value = stack.pop()
        if isinstance(value, (Opaque, StandIn)):
            if not value.is_plain:
                found.add(value.kind or "an unknown class" if isinstance(value, Opaque) else str(value))
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            stack += [*value, *value.values()] if isinstance(value, Mapping) else value
    return found


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
    return isinstance(state, Mapping) and all(isinstance(state.get(part), Mapping) for part in parts)


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
        not_saved = one.state.get("_non_persistent_buffers_set")
        not_saved = (
            {name for name in not_saved if isinstance(name, str)} if isinstance(not_saved, (list, tuple)) else ()
        )
        parts = {**one.state["_parameters"], **one.state["_buffers"]}
        children = []
        for name, part in one.state["_modules"].items():
            if _is_module(part):
                children.append((f"{prefix}{name}.", part))
            else:
                parts[name] = part
        if one.kind.startswith(_QUANTIZED_MODULES):
            parts["weight"] = one
        for name, part in parts.items():
            if part is None or name in not_saved:
                continue
            if not isinstance(part, TensorInfo):
                part = TensorInfo("?", None, None, kind=getattr(part, "kind", "") or "unknown")
            weights[f"{prefix}{name}"] = part
        stack += reversed(children)
    return weights


def _nested_state_dicts(content: Mapping[str, Any], path: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in content.items():
        mapping = _as_mapping(value)
        if not mapping or not isinstance(name, str) or name in _ARGUMENTS or "param_groups" in mapping:
            continue
        if is_state_dict(mapping):
            yield path + name, mapping
        elif depth > 1:
            yield from _nested_state_dicts(mapping, f"{path}{name}.", depth - 1)
