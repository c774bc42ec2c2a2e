"""What a file says that it holds, before any of it is loaded: tensors, their storages, and objects of other classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_gpu_tools.checkpoints.unsafe_globals import beyond_plain_data

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
# Legacy storage classes, by the dtype that torch prints.
DTYPE_OF_STORAGE = {
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
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
# Python's own limit of recursion is 1,000, and copying takes three calls for each level.
MAX_DEPTH = 200


# Nobody changes one. But a frozen one takes three times as long to make, and a file may describe 300,000 of them.
@dataclass(slots=True, unsafe_hash=True)
class StorageInfo:
    """A storage in the file: a block of numbers.

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

    @property
    def size_bytes(self) -> int:
        """What its numbers take."""
        return self.numel * BYTES_OF_DTYPE[self.dtype]


@dataclass(slots=True, unsafe_hash=True)
class TensorInfo:
    """A tensor as the pickle describes it.

    Attributes:
        dtype: As torch prints it without ``torch.``; ``"?"`` if the pickle does not tell.
        shape: Its size; ``None`` if the pickle does not tell.
        storage: Where its numbers are; ``None`` for tensors that are not one block of numbers.
        attributes: What a program has hung on it, which is saved and copied with it.
        offset: Where in the storage its first number is.
        strides: How far apart its numbers are in the storage, by dimension; ``None`` where they are in a row.
        kind: What it is beside these numbers: ``"sparse"``, ``"quantized"``, the name of a subclass; ``""`` if nothing.
        is_parameter: Whether it is a parameter, requires gradients like one, or has attributes.
    """

    dtype: str
    shape: tuple[int, ...] | None
    storage: StorageInfo | None
    attributes: Any = field(default=None, compare=False)
    offset: int = 0
    strides: tuple[int, ...] | None = None
    kind: str = ""
    is_parameter: bool = field(default=False, compare=False)


@dataclass(eq=False, repr=False, slots=True)
class Opaque:
    """An object that only running code could build, or the class of one: inert, whatever is done to it.

    Attributes:
        is_plain: Whether ``weights_only=True`` would build it.
        kind: What it would be built by, ``module.name``; ``""`` if that is not in the pickle either.
        state: What it would be given then; before that, the arguments of the call that would make it.
        items: What would be put into it, if it is like a dictionary.
    """

    is_plain: bool = False
    kind: str = ""
    state: Any = ()
    items: dict[Any, Any] | None = None


class StandIn:
    """Takes the place of a class, a function or a constant; as text it is their name."""

    __slots__ = ("is_plain", "module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.is_plain = not beyond_plain_data([f"{module}.{name}"])

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def are_sizes(numbers: Sequence[Any]) -> bool:
    """Whether these can be sizes, offsets and strides: whole numbers that fit into 64 bits and are not negative."""
    return not numbers or ({*map(type, numbers)} == {int} and min(numbers) >= 0 and max(numbers) < 2**63)
