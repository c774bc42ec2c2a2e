"""Reading the structure that a pickle describes, without imports or calls. Checks everything that torch would trust."""

from __future__ import annotations

import math
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import IO, Any, ClassVar

from lightning_gpu_tools.checkpoints.arrays import array_of_buffer, array_of_state
from lightning_gpu_tools.checkpoints.faults import Fault, damaged
from lightning_gpu_tools.checkpoints.structure import (
    BYTES_OF_DTYPE,
    DTYPE_OF_STORAGE,
    Opaque,
    StandIn,
    StorageInfo,
    TensorInfo,
    are_sizes,
    is_shape,
)

_ELEMENTS_PER_BYTE = {"quint4x2": 2, "quint2x4": 4}
# Number of arguments: a storage, an offset in it, a shape, strides and more.
_MAKERS_OF_VIEWS = {
    "_rebuild_tensor": (4,),
    "_rebuild_tensor_v2": (6, 7),
    "_rebuild_tensor_v3": (7, 8),
    "_rebuild_qtensor": (7,),
}
_MAKERS_OF_OTHERS = {
    "_rebuild_meta_tensor_no_storage": "meta",
    "_rebuild_sparse_tensor": "sparse",
    "_rebuild_nested_tensor": "nested",
    "_rebuild_wrapper_subclass": "subclassed",
    "_rebuild_device_tensor_from_numpy": "NumPy",
    "_rebuild_device_tensor_from_cpu_tensor": "",
}
# NumPy 2 has moved them.
_MAKES_ARRAY = frozenset(f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core"))
_ARRAY_FROM_BUFFER = frozenset(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core"))
_MAX_BETWEEN = 32  # objects that a pickle of NumPy stores between an array and its state
_PLAIN_TENSORS = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})
# Python hashes nested tuples recursively without a limit, and again wherever they occur.
_MAX_KEY_PARTS = 256
_MAX_DIMENSIONS = 64  # the limit of torch's operations
_MAX_ARGUMENTS = 10


class _Set(tuple[Any, ...]):
    """The elements of a set or a shape, not hashed."""

    __slots__ = ()


class _GrowingSet(list[Any]):
    """A set that is still being filled. A list is smaller and hashes nothing."""

    __slots__ = ()


class StructureReader(pickle._Unpickler):
    """A reader of pickles as plain data, :class:`TensorInfo` and :class:`Opaque`, in memory proportional to their size.

    It does not use the unpickler in C, in which one opcode of a hostile file reserves 64 GiB for the memo.
    """

    # Missing in the type stubs.
    memo: dict[int, Any]
    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: IO[bytes], size_bytes: int, *, legacy: bool = False, encoding: str = "utf-8") -> None:
        super().__init__(file, encoding=encoding, errors="replace")
        self._file = file
        # "module.name", or "module.name(...)" for calls that weights_only=True allows but plain data never needs.
        self.globals: set[str] = set()
        self.filled: set[str] = set()  # classes of objects that get elements
        self.storages: dict[str, StorageInfo] = {}
        self._stand_ins: dict[tuple[str, str], StandIn] = {}
        self._is_legacy = legacy
        self._left_to_copy = size_bytes

    def load(self) -> Any:
        """Return the structure that the pickle describes."""
        # As in pickle, but without frames.
        self.read, self.readline = self._file.read, self._file.readline
        self.metastack: list[list[Any]] = []
        self.stack = []
        self.append = self.stack.append
        read, dispatch = self.read, self.dispatch
        try:
            while True:
                dispatch[read(1)[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in instead of importing anything."""
        # torch.save writes Python 2 names.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if (module, name) not in self._stand_ins:
            self.globals.add(f"{module}.{name}")
            self._stand_ins[module, name] = StandIn(module, name)
        return self._stand_ins[module, name]

    def get_extension(self, code: int) -> None:
        """Push a stand-in for the object that ``copyreg`` registers with this code."""
        self.append(self.find_class("copyreg", f"extension_{code}"))

    def persistent_load(self, pid: Any) -> Any:
        """Return the described storage for ``("storage", class, key, location, numel)``."""
        kind_of_pid = pid[0] if isinstance(pid, tuple) and pid else None
        if self._is_legacy and kind_of_pid in ("module", b"module") and len(pid) > 1 and isinstance(pid[1], StandIn):
            return pid[1]  # a module's class; its source follows
        _, kind, key, location, numel, *view = pid
        if kind_of_pid not in ("storage", b"storage") or view != ([None] if self._is_legacy else []):
            raise _not_by_torch()  # or by torch before 0.4, whose tensors share numbers
        name = kind.name if isinstance(kind, StandIn) else ""
        if self._is_legacy and name == "UntypedStorage":  # written, but never read back
            name = ""
        dtype = DTYPE_OF_STORAGE.get(name)
        are_of_their_types = isinstance(key, str) and isinstance(location, (str, bytes)) and are_sizes((numel,))
        if dtype is None or not are_of_their_types:
            raise _not_by_torch()
        place = location if isinstance(location, str) else location.decode("ascii", "replace")
        storage = StorageInfo(key, dtype, place, numel)
        before = self.storages.setdefault(key, storage)  # torch uses the first
        if before.size_bytes != storage.size_bytes or (before.dtype != dtype and before.size_bytes):
            raise _not_by_torch()
        return storage

    # -- opcodes that run, copy or trust something in pickle ---------------------------------------------------------

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    def _newobj_ex(self) -> None:
        del self.stack[-2:]
        kind = self.stack[-1]
        self.stack[-1] = Opaque(kind=str(kind) if isinstance(kind, StandIn) else "")

    def _instantiate(self, kind: Any, arguments: list[Any]) -> None:
        self.append(self._call(kind, tuple(arguments)))

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, OrderedDict) and isinstance(state, dict):
            self._copy(state)
            for key in state:
                _check_key(key)
            vars(target).update(state)
        elif isinstance(target, TensorInfo) or (isinstance(target, Opaque) and target.is_plain):
            self.globals.add("torch.Tensor.__setstate__(...)")  # could reach beyond the storage
            if isinstance(target, TensorInfo):
                target.kind = "changed"
        elif isinstance(target, Opaque) and target.kind in _MAKES_ARRAY and (array := array_of_state(state)):
            self._replace(target, array)
        elif isinstance(target, Opaque):
            is_dtype = target.kind == "numpy.dtype" and isinstance(target.state, tuple)
            target.state = (*target.state[:3], state) if is_dtype else state
        else:
            raise _not_by_torch()

    def _replace(self, target: Opaque, array: TensorInfo) -> None:
        """Put an array in the place of its object, whose memo may be read again."""
        self.stack[-1] = array
        for number in range(len(self.memo), max(-1, len(self.memo) - _MAX_BETWEEN), -1):
            if self.memo.get(number) is target:
                self.memo[number] = array

    def _setitem(self) -> None:
        items = self.stack[-2:]
        del self.stack[-2:]
        self._assign(items)

    def _setitems(self) -> None:
        self._assign(self.pop_mark())

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._assign(items)

    def _assign(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Opaque) and not target.is_plain:
            self.filled.add(target.kind or "unknown")
            if target.items is None:
                target.items = {}
            target = target.items
        if not isinstance(target, dict):
            raise _not_by_torch()
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is not str:
                _check_key(key)
            target[key] = items[i + 1]

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Opaque):
            self.filled.add(target.kind or "unknown")
        else:
            target.extend(items)

    def _empty_set(self) -> None:
        self.append(_GrowingSet())

    def _frozenset(self) -> None:
        items = self.pop_mark()  # this replaces self.append
        self.append(_Set(items))

    def _frame(self) -> None:
        self.read(8)

    def _bytearray8(self) -> None:
        length = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(length)))  # pickle would reserve any length in the file

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
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.ADDITEMS[0]: _appends,
        pickle.FROZENSET[0]: _frozenset,
        pickle.BYTEARRAY8[0]: _bytearray8,
        pickle.FRAME[0]: _frame,
    }

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(arguments, tuple) or not isinstance(function, (StandIn, Opaque)):
            raise _not_by_torch()
        if isinstance(function, Opaque):
            return Opaque()
        if function.module == "torch._utils":
            if function.name in _MAKERS_OF_VIEWS:
                return _view(function.name, *arguments)
            if function.name in _MAKERS_OF_OTHERS:
                return self._other_tensor(function, arguments)
            if function.name in ("_rebuild_parameter", "_rebuild_parameter_with_state") and arguments:
                return _changed(arguments[0], is_parameter=True)
        name = str(function)
        if name == "torch._tensor._rebuild_from_type_v2" and len(arguments) >= 3:
            build, kind, inner, *_ = arguments
            made = _changed(self._call(build, inner), is_parameter=True)
            return made if str(kind) in _PLAIN_TENSORS else _changed(made, kind=str(kind))
        if name == "torch.nn.parameter.Parameter" and arguments:
            return _changed(arguments[0], is_parameter=True)
        if name in ("collections.OrderedDict", "collections.Counter"):
            mapping: dict[Any, Any] = OrderedDict() if function.name == "OrderedDict" else Counter()
            for argument in arguments[:1]:
                self._copy(argument)
                for key, value in argument.items() if isinstance(argument, dict) else argument:
                    _check_key(key)
                    mapping[key] = value
            return mapping
        is_set = name in ("torch.Size", "builtins.set", "builtins.frozenset")
        if is_set and len(arguments) == 1 and isinstance(arguments[0], (tuple, list)):
            self._copy(arguments[0])
            for element in arguments[0]:
                _check_key(element)
            return _Set(arguments[0])
        if name in _ARRAY_FROM_BUFFER and (array := array_of_buffer(arguments)):
            return array
        if function.is_plain and not _needs_no_more_memory(name, arguments):
            self.globals.add(f"{name}(...)")
        return Opaque(function.is_plain, name, arguments)

    def _copy(self, elements: Any) -> None:
        """Raise if more elements are copied than the pickle has bytes."""
        self._left_to_copy -= len(elements)
        if self._left_to_copy < 0:
            raise _not_by_torch()

    def _other_tensor(self, maker: StandIn, arguments: tuple[Any, ...]) -> TensorInfo:
        first = arguments[0] if arguments else None
        if len(arguments) >= _MAX_ARGUMENTS or isinstance(first, StorageInfo):
            raise _not_by_torch()
        dtypes = _dtypes(arguments)
        if isinstance(first, TensorInfo) and maker.name == "_rebuild_device_tensor_from_cpu_tensor":
            if dtypes == [first.dtype]:
                return first
            self.globals.add(f"{maker}(...)")  # a copy, much larger if its elements share one place
            return replace(first, kind="changed")
        if maker.name == "_rebuild_sparse_tensor":
            arguments = arguments[1] if len(arguments) == 2 else ()
            if not isinstance(arguments, tuple) or len(arguments) not in (3, 4):
                raise _not_by_torch()
            dtypes = [part.dtype for part in arguments if isinstance(part, TensorInfo)][-1:]
        sizes = [a for a in arguments if _is_short(a) and all(isinstance(n, int) for n in a)]
        if sizes and not are_sizes(sizes[0]):
            raise _not_by_torch()
        kind = _MAKERS_OF_OTHERS[maker.name]
        if kind == "subclassed" and isinstance(first, StandIn):
            kind = str(first)
        return TensorInfo(dtypes[0] if dtypes else "?", tuple(sizes[0]) if sizes else None, None, kind=kind)


def _view(maker: str, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TensorInfo:
    counts = _MAKERS_OF_VIEWS[maker]
    if 4 + len(rest) not in counts or not isinstance(storage, StorageInfo):
        raise _not_by_torch()
    dtype = storage.dtype
    if maker == "_rebuild_tensor_v3" and (own := _dtypes(rest)):  # of an untyped storage
        dtype = own[0]
    _check_view(storage, offset, shape, strides, dtype)
    kind = ""
    if maker == "_rebuild_qtensor":
        _check_channels(shape, rest[0])
        kind = "quantized"
    elif 4 + len(rest) == max(counts) > 4 and rest[-1]:
        kind = "conjugated"
    has_more = any(rest[:2])  # requires gradients, has hooks
    return TensorInfo(dtype, tuple(shape), storage, offset, tuple(strides), kind, has_more)


def _not_by_torch() -> Fault:
    return damaged("its pickle was not written by torch.save")


def _dtypes(arguments: Sequence[Any]) -> list[str]:
    return [a.name for a in arguments if isinstance(a, StandIn) and a.module == "torch" and a.name != "Tensor"]


def _is_short(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) <= _MAX_DIMENSIONS


def _check_view(storage: StorageInfo, offset: Any, shape: Any, strides: Any, dtype: str) -> None:
    """Raise unless all elements of a tensor are inside its storage."""
    are_lists = _is_short(shape) and _is_short(strides) and len(shape) == len(strides)
    if not are_lists or not is_shape(shape) or not are_sizes((offset, *strides)) or dtype not in BYTES_OF_DTYPE:
        raise _not_by_torch()
    elements = storage.size_bytes * _ELEMENTS_PER_BYTE.get(dtype, 1) // BYTES_OF_DTYPE[dtype]
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and last >= elements:
        raise _not_by_torch()


def _check_channels(shape: Sequence[int], quantizer: Any) -> None:
    """Raise unless a tensor quantized per channel has a scale for each channel; old torch does not check."""
    if not isinstance(quantizer, tuple) or len(quantizer) == 3:  # one scale for all
        return
    _, scales, zero_points, axis = quantizer
    channels = shape[axis] if are_sizes((axis,)) and axis < len(shape) else None
    for numbers in (scales, zero_points):
        count = math.prod(numbers.shape or ()) if isinstance(numbers, TensorInfo) else len(numbers)
        if count != channels:
            raise _not_by_torch()


def _check_key(key: Any) -> None:
    """Raise if hashing the key would not end, or would crash the process."""
    parts = [key]
    for _ in range(_MAX_KEY_PARTS):
        if not parts:
            return
        part = parts.pop()
        if isinstance(part, tuple):
            parts.extend(part[:_MAX_KEY_PARTS])
    raise _not_by_torch()


def _needs_no_more_memory(name: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether the result of a call that ``weights_only=True`` allows is no larger than its arguments."""
    if name == "_codecs.encode":  # of bytes; other codecs can expand repeatedly
        return len(arguments) == 2 and isinstance(arguments[0], str) and arguments[1] in ("latin1", "latin-1")
    if name == "builtins.bytearray":
        return not arguments or not isinstance(arguments[0], int)
    if name.startswith(("torch.sparse.", "torch.cuda.sparse.")) or name.endswith("Storage"):
        return False  # not every version of torch checks these
    return not name.endswith("Tensor") or not arguments  # a legacy constructor, which takes a number as a size


def _changed(described: Any, **changes: Any) -> Any:
    return replace(described, **changes) if isinstance(described, TensorInfo) else described
