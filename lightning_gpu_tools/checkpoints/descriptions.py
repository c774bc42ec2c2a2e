"""What a file says that it holds, before any of it is loaded: tensors, storages, and objects of other classes."""

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
# Python's limit of recursion is 1,000, and copying takes three calls per level.
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
        """Its size, by its description."""
        return self.numel * BYTES_OF_DTYPE[self.dtype]


@dataclass(slots=True, unsafe_hash=True)
class TensorInfo:
    """A tensor as the file describes it."""

    dtype: str  # "?" if the file does not say
    shape: tuple[int, ...] | None  # None if the file does not say
    storage: StorageInfo | None  # None if the numbers are not one block
    attributes: Any = field(default=None, compare=False)  # what a program has hung on it
    offset: int = 0  # of its first number in the storage
    strides: tuple[int, ...] | None = None  # None: its numbers are in a row
    kind: str = ""  # "sparse", "quantized", the name of a subclass, ...; "" if it is just numbers
    is_parameter: bool = field(default=False, compare=False)  # or requires gradients, or has attributes


@dataclass(eq=False, repr=False, slots=True)
class Opaque:
    """An object that only running code could build: inert, whatever is done to it."""

    is_plain: bool = False  # weights_only=True would build it
    kind: str = ""  # what would build it: "module.name", or "" if that is not known
    state: Any = ()  # what it would get; else the arguments of the call that would make it
    items: dict[Any, Any] | None = None  # what would be put into it


class StandIn:
    """Stands for a class, a function or a constant; as text it is their name."""

    __slots__ = ("is_plain", "module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.is_plain = not beyond_plain_data([f"{module}.{name}"])

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def are_sizes(numbers: Sequence[Any]) -> bool:
    """Whether these can be sizes, offsets and strides: whole numbers of 63 bits that are not negative."""
    return not numbers or ({*map(type, numbers)} == {int} and min(numbers) >= 0 and max(numbers) < 2**63)
