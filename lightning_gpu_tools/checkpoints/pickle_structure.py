"""What a pickle describes, read without running any of it.

Every class and function that the pickle names is replaced by an inert stand-in, so nothing is imported and nothing is
called. Tensors come out as :class:`TensorInfo`, everything else that is not plain data as :class:`Opaque`.
"""

from __future__ import annotations

import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

_TENSOR_MAKERS = frozenset(
    {
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_qtensor",
        "_rebuild_meta_tensor_no_storage",
        "_rebuild_sparse_tensor",
        "_rebuild_nested_tensor",
        "_rebuild_wrapper_subclass",
        "_rebuild_device_tensor_from_numpy",
        "_rebuild_device_tensor_from_cpu_tensor",
    }
)
# Legacy storage classes, by the dtype that torch prints.
_DTYPE_OF_STORAGE = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "UntypedStorage": "uint8",
}


@dataclass(frozen=True)
class StorageInfo:
    """A block of numbers in the file.

    Attributes:
        key: Its name in the file.
        dtype: Of its elements, as torch prints it without ``torch.``.
        location: Device it was saved from, ``"cuda:2"``.
        numel: Number of elements.
    """

    key: str
    dtype: str
    location: str
    numel: int


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the pickle describes it.

    Attributes:
        dtype: As torch prints it without ``torch.``; ``"?"`` if the pickle does not tell.
        shape: Its size; ``None`` if the pickle does not tell.
        storage: Where its numbers are; ``None`` for tensors that are not one block of numbers.
        kind: ``"tensor"``, ``"parameter"``, or the function that would build it.
    """

    dtype: str
    shape: tuple[int, ...] | None
    storage: StorageInfo | None
    kind: str = "tensor"


@dataclass(eq=False)
class Opaque:
    """An object that only running code could build: hashable, callable, appendable, assignable, and inert in all of it.

    It may stand for a class: one inside another class is ``getattr(Outer, "Inner")`` in a pickle.
    """

    made_by: Any
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The unpickler makes objects with cls.__new__(cls, ...); an instance's own attribute comes before the type's.
        self.__dict__["__new__"] = _new

    def __call__(self, *arguments: Any) -> Opaque:
        """Describe the call, as a stand-in does."""
        return Opaque(self, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """Take an element of a list subclass."""
        self.items.append(value)

    def extend(self, values: Sequence[Any]) -> None:
        """Take elements of a list subclass."""
        self.items.extend(values)

    def add(self, value: Any) -> None:
        """Take an element of a set subclass."""
        self.items.append(value)


class StructureReader(pickle._Unpickler):
    """Reads one pickle into plain data, :class:`TensorInfo` and :class:`Opaque`.

    It is the unpickler in Python, not the faster one in C: there a single opcode of a hostile file can reserve 64 GiB
    for its memo.

    Attributes:
        globals: Every class and function that was named, ``module.name``.
        storages: Every block of numbers that was referred to, by its key.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="utf-8", errors="replace")
        self.globals: set[str] = set()
        self.storages: dict[str, StorageInfo] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return an inert stand-in; never import anything."""
        # torch.save writes the names of Python 2, and every reader translates them.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.globals.add(f"{module}.{name}")
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return _StandIn(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of a storage: ``("storage", class, key, location, numel, ...)``."""
        if isinstance(pid, tuple) and len(pid) >= 5 and pid[0] in ("storage", b"storage"):
            kind = pid[1].name if isinstance(pid[1], _StandIn) else str(pid[1])
            numel = pid[4] if isinstance(pid[4], int) else 0
            storage = StorageInfo(str(pid[2]), _DTYPE_OF_STORAGE.get(kind, kind), str(pid[3]), numel)
            self.storages[storage.key] = storage
            return storage
        return Opaque("persistent id", (pid,))


class _StandIn:
    """Takes the place of a class or function; calling it describes the call."""

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.__dict__["__new__"] = _new  # as in Opaque

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __call__(self, *arguments: Any) -> Any:
        if self.module == "torch._utils":
            if self.name in _TENSOR_MAKERS:
                return _describe_tensor(self.name, arguments)
            if self.name in ("_rebuild_parameter", "_rebuild_parameter_with_state") and arguments:
                return _as_kind(arguments[0], "parameter")
        if (self.module, self.name) == ("torch._tensor", "_rebuild_from_type_v2") and len(arguments) >= 3:
            build, kind, inner = arguments[:3]
            described = build(*inner) if isinstance(build, _StandIn) and isinstance(inner, tuple) else None
            return _as_kind(described, str(kind)) if isinstance(described, TensorInfo) else Opaque(self, arguments)
        if (self.module, self.name) in (
            ("torch", "Size"),
            ("builtins", "set"),
            ("builtins", "frozenset"),
        ) and arguments:
            return tuple(arguments[0]) if isinstance(arguments[0], (tuple, list)) else Opaque(self, arguments)
        return Opaque(self, arguments)


def _new(stand_in: _StandIn | Opaque, *arguments: Any, **keywords: Any) -> Opaque:
    return Opaque(stand_in, (*arguments, *keywords.values()))


def _as_kind(described: Any, kind: str) -> Any:
    return replace(described, kind=kind) if isinstance(described, TensorInfo) else described


def _describe_tensor(maker: str, arguments: tuple[Any, ...]) -> TensorInfo:
    storage = next((a for a in arguments if isinstance(a, StorageInfo)), None)
    dtypes = [a.name for a in arguments if isinstance(a, _StandIn) and a.module == "torch" and a.name != "Tensor"]
    dtype = storage.dtype if storage is not None else "?"
    if dtypes:  # tensors of an untyped storage bring their own
        dtype = dtypes[0]
    sizes = [a for a in arguments[1 if storage else 0 :] if isinstance(a, (tuple, list)) and _is_size(a)]
    kind = "tensor" if maker.startswith(("_rebuild_tensor", "_rebuild_device")) else maker.removeprefix("_rebuild_")
    return TensorInfo(dtype, tuple(sizes[0]) if sizes else None, storage, kind)


def _is_size(value: tuple[Any, ...] | list[Any]) -> bool:
    return all(isinstance(n, int) for n in value)
