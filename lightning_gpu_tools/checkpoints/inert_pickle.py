"""The content of a pickle, read without importing or calling anything that it names, and what these names are."""

import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.checkpoints.structure import (
    BYTES_OF_DTYPE,
    DTYPE_OF_STORAGE,
    StorageInfo,
    TensorInfo,
    are_sizes,
    is_shape,
)
from lightning_gpu_tools.units import printable_path

_VIEWS = frozenset(f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "qtensor"))
_PARAMETERS = frozenset(
    {"torch.nn.parameter.Parameter"} | {f"torch._utils._rebuild_parameter{end}" for end in ("", "_with_state")}
)
_PLAIN_TENSORS = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})
_MAPPINGS = {"collections.OrderedDict": OrderedDict, "collections.Counter": Counter}
_ELEMENTS = frozenset({"torch.Size", "builtins.set", "builtins.frozenset"})
# Calls that plain data needs. weights_only=True allows more, such as torch.FloatTensor(1 << 40).
_CALLS = frozenset({"torch.device", "torch.serialization._get_layout", "builtins.complex"})
_MAX_KEY_PARTS = 256  # our default; Python hashes nested tuples recursively, without a limit


_NUMBERS = "Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool|Complex(Float|Double)"
# Accepted by torch.load(weights_only=True) since 2.6: torch/_weights_only_unpickler.py. A test compares them.
_PLAIN = re.compile(
    r"collections\.(OrderedDict|Counter)"
    r"|torch\.nn\.parameter\.Parameter"
    r"|torch\.(Size|Tensor|device|serialization\._get_layout|_tensor\._rebuild_from_type_v2)"
    r"|torch\._utils\._rebuild_(parameter(_with_state)?|q?tensor|tensor_v[23]|(sparse|nested)_tensor"
    r"|meta_tensor_no_storage|wrapper_subclass|device_tensor_from_(numpy|cpu_tensor))"
    rf"|torch\.(cuda\.)?({_NUMBERS}|QU?Int8|QInt32|QUInt4x2|QUInt2x4)Storage"
    r"|torch\.storage\.(Unt|T)ypedStorage"
    rf"|torch\.(cuda\.|sparse\.|cuda\.sparse\.)?({_NUMBERS})Tensor"
    r"|torch\.(q?u?int\d+(x\d)?|quint\dx\d|b?float\d+\w*|float4_e2m1fn_x2|b?complex\d+|bool|bits\w+)"
    r"|torch\.per_(tensor_affine|tensor_symmetric|channel_affine(_float_qparams)?|channel_symmetric)"
    r"|_codecs\.encode"
    r"|builtins\.(bytearray|set|complex)"
)


def beyond_plain_data(names: Iterable[str]) -> list[str]:
    """Return the names that ``weights_only=True`` refuses by default, and the calls ``module.name(...)``."""
    return sorted(name for name in names if not _PLAIN.fullmatch(name))


def explain_blocked(path: str, names: Iterable[str]) -> str:
    """Return a message with the names that block a file."""
    return (
        f"{printable_path(path)} holds more than plain data, so it was not opened. No code in it has run.\n"
        f"  Opening it would import or call {listed(sorted({*names}))}."
    )


def describe_unread(names: Sequence[str]) -> str:
    """Return a note on unread parts; ``""`` if there are none."""
    return f"not read, because opening would run code: {listed(names, 3)}" if names else ""


@dataclass(eq=False, repr=False, slots=True)
class Opaque:
    """An inert placeholder for an object that only running code could build."""

    is_plain: bool = False  # whether weights_only=True would build it
    kind: str = ""  # class or function that would build it, "module.name"; "" if unknown
    state: Any = ()  # state that it would get, or arguments of the call that would build it
    items: dict[Any, Any] | None = None  # items that it would get

    def append(self, item: Any) -> None:
        """Do nothing: the elements of an object are not needed to describe it."""

    extend = add = append


class Elements(tuple[Any, ...]):
    """The elements of a set or a shape, not hashed."""

    __slots__ = ()


class StandIn:
    """A placeholder for a class, a function or a constant; ``str()`` returns the name."""

    __slots__ = ("is_plain", "module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.is_plain = not beyond_plain_data([f"{module}.{name}"])

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class InertUnpickler(pickle._Unpickler):
    """Python's own unpickler with inert objects in place of everything that a pickle names.

    Classes and functions become :class:`StandIn`, storages :class:`StorageInfo`, and what a call would make
    :class:`TensorInfo` or :class:`Opaque`. Memory stays in proportion to the pickle: the memo is a dictionary here, not
    an array as in C. Damaged and hostile pickles raise any ``Exception``.
    """

    # Missing in the type stubs.
    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: Any, size_bytes: int) -> None:
        super().__init__(file, encoding="utf-8", errors="replace")
        # "module.name", or "module.name(...)" for calls that weights_only=True allows but plain data never needs.
        self.globals: set[str] = set()
        self.storages: dict[str, StorageInfo] = {}
        self._stand_ins: dict[tuple[str, str], StandIn] = {}
        self._left_to_copy = size_bytes

    def find_class(self, module: str, name: str) -> StandIn:
        """Return a stand-in instead of importing anything."""
        # torch.save writes Python 2 names.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if (module, name) not in self._stand_ins:
            self.globals.add(f"{module}.{name}")
            self._stand_ins[module, name] = StandIn(module, name)
        return self._stand_ins[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Return the storage that ``("storage", class, key, location, numel)`` describes."""
        if pid[0] == "module":  # a class; its source follows. Only in torch's legacy format.
            return pid[1]
        tag, kind, key, location, numel, *view = pid
        is_text = isinstance(key, str) and isinstance(location, str)
        if tag != "storage" or not is_text or not are_sizes((numel,)) or any(view):
            raise pickle.UnpicklingError("a storage that torch.save does not write")
        return self.storages.setdefault(key, StorageInfo(key, DTYPE_OF_STORAGE[kind.name], location, numel))

    # -- opcodes that call, hash or reserve what a pickle says -------------------------------------------------------

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    def _newobj_ex(self) -> None:
        del self.stack[-2:]
        self.stack[-1] = Opaque(kind=str(self.stack[-1]))

    def _instantiate(self, kind: Any, arguments: list[Any]) -> None:
        self.append(self._call(kind, tuple(arguments)))

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, OrderedDict) and isinstance(state, dict):
            self._count_copies(state)
            vars(target).update(state)
        elif isinstance(target, Opaque):
            target.state = state
        else:
            raise pickle.UnpicklingError("a state for something without one")

    def _setitem(self) -> None:
        items = self.stack[-2:]
        del self.stack[-2:]
        self._put(items)

    def _setitems(self) -> None:
        self._put(self.pop_mark())

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._put(items)

    def _empty_set(self) -> None:
        self.append(Opaque(kind="builtins.set"))

    def _frozenset(self) -> None:
        items = self.pop_mark()  # this replaces self.append
        self.append(Elements(items))

    def _bytearray8(self) -> None:
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _reduce,
        pickle.NEWOBJ_EX[0]: _newobj_ex,
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems,
        pickle.DICT[0]: _dict,
        pickle.EMPTY_SET[0]: _empty_set,
        pickle.FROZENSET[0]: _frozenset,
        pickle.BYTEARRAY8[0]: _bytearray8,
    }

    def _put(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Opaque) and not target.is_plain:
            if target.items is None:
                target.items = {}
            target = target.items
        if not isinstance(target, dict):
            raise pickle.UnpicklingError("an item for something that is not a dictionary")
        _fill(target, zip(items[::2], items[1::2], strict=True))

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(arguments, tuple):
            raise pickle.UnpicklingError("a call without arguments")
        if isinstance(function, Opaque):
            return Opaque()
        if not isinstance(function, StandIn):
            raise pickle.UnpicklingError("a call of data")
        name = str(function)
        if name in _VIEWS:
            return _view(function.name, *arguments)
        if name in _PARAMETERS and arguments:
            return _changed(arguments[0], is_parameter=True)
        if name == "torch._tensor._rebuild_from_type_v2":
            build, kind, inner, *_ = arguments
            made = _changed(self._call(build, inner), is_parameter=True)
            return made if str(kind) in _PLAIN_TENSORS else _changed(made, kind=str(kind))
        if name in _MAPPINGS:
            items = arguments[0] if arguments else ()
            self._count_copies(items)
            return _fill(_MAPPINGS[name](), items.items() if isinstance(items, dict) else items)
        if name in _ELEMENTS and arguments and isinstance(arguments[0], (tuple, list)):
            self._count_copies(arguments[0])
            return Elements(arguments[0])
        if function.module == "torch._utils":
            if name.endswith("_meta_tensor_no_storage"):
                return _without_numbers("meta", *arguments[:2])
            if name.endswith("_wrapper_subclass"):
                return _without_numbers(str(arguments[0]), *arguments[1:3])
            return TensorInfo("?", None, None, kind=function.name.removeprefix("_rebuild_").partition("_")[0])
        if function.is_plain and not _is_needed(name, arguments):
            self.globals.add(f"{name}(...)")
        return Opaque(function.is_plain, name, arguments)

    def _count_copies(self, elements: Collection[Any]) -> None:
        """Raise if more elements are copied than the pickle has bytes."""
        self._left_to_copy -= len(elements)
        if self._left_to_copy < 0:
            raise pickle.UnpicklingError("copies of copies")


def _view(maker: str, storage: StorageInfo, offset: Any, shape: Any, strides: Any, *rest: Any) -> TensorInfo:
    """Describe a tensor; raise unless all its elements are inside its storage."""
    if not isinstance(storage, StorageInfo):
        raise pickle.UnpicklingError("a tensor without a storage")
    dtype, kind = storage.dtype, ""
    if maker == "_rebuild_qtensor":
        kind, rest = "quantized", rest[1:]
    elif maker == "_rebuild_tensor_v3":  # of an untyped storage
        dtype, rest = rest[2].name, (*rest[:2], *rest[3:])
    if any(rest[2:]):
        kind = "conjugated"
    if len(shape) != len(strides) or not is_shape(shape) or not are_sizes((offset, *strides)):
        raise pickle.UnpicklingError("a tensor without sizes")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    # Of quantized tensors, which may have several numbers in a byte, torch checks this.
    if kind != "quantized" and 0 not in shape and (last + 1) * BYTES_OF_DTYPE[dtype] > storage.size_bytes:
        raise pickle.UnpicklingError("a tensor that is larger than its storage")
    has_more = any(rest[:2])  # requires gradients, has hooks
    return TensorInfo(dtype, tuple(shape), storage, offset, tuple(strides), kind, has_more)


def _without_numbers(kind: str, dtype: StandIn, shape: tuple[int, ...]) -> TensorInfo:
    if not is_shape(shape):
        raise pickle.UnpicklingError("a tensor without sizes")
    return TensorInfo(dtype.name, tuple(shape), None, kind=kind)


def _fill(target: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Put items into a dictionary; raise if hashing a key would not end, or would crash the process."""
    for key, value in items:
        if type(key) is not str:
            _check_key(key)
        target[key] = value
    return target


def _check_key(key: Any) -> None:
    parts = [key]
    for _ in range(_MAX_KEY_PARTS):
        if not parts:
            return
        part = parts.pop()
        if isinstance(part, tuple):
            parts.extend(part[:_MAX_KEY_PARTS])
    raise pickle.UnpicklingError("a key of too many parts")


def _is_needed(name: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether plain data needs this call, whose result is no larger than its arguments."""
    if name == "_codecs.encode":  # of bytes; other codecs can expand repeatedly
        return len(arguments) == 2 and isinstance(arguments[0], str) and arguments[1] in ("latin1", "latin-1")
    if name == "builtins.bytearray":
        return not arguments or not isinstance(arguments[0], int)
    return name in _CALLS or name in _ELEMENTS


def _changed(described: Any, **changes: Any) -> Any:
    return replace(described, **changes) if isinstance(described, TensorInfo) else described
