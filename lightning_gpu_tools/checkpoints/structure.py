"""The description of a checkpoint file before loading: tensors, objects, the location of the weights, and faults."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import operator
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError
from lightning_gpu_tools.units import printable, printable_path

# Ends of the names of checkpoint files: of those that are looked for in a folder, and of the targets of `convert`.
SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
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
_MAX_DIMENSIONS = 64  # the limit of torch's operations


@dataclass(eq=False)
class Fault(Exception):
    """The reason that a file is not a valid checkpoint."""

    what: str  # without the subject: "is empty"
    advice: str = ""


RESTORE = "Copy or download it again, or use an earlier checkpoint."


def damaged(what: str) -> Fault:
    """Return the fault for a file that contradicts itself."""
    return Fault(f"is damaged: {what}", RESTORE)


@contextlib.contextmanager
def faults_of(path: object) -> Iterator[None]:
    """Turn a :class:`Fault` into an error that names the file."""
    try:
        yield
    except Fault as fault:
        raise BrokenCheckpointError(f"{printable_path(path)} {fault.what}. {fault.advice}".rstrip()) from None
    except RecursionError:
        raise BrokenCheckpointError(f"{printable_path(path)} nests its contents too deeply, or endlessly.") from None


@contextlib.contextmanager
def any_error_is(fault: Fault) -> Iterator[None]:
    """Raise ``fault`` instead of any error that damaged or hostile contents cause."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (Fault, CheckpointError)) or not comes_from_contents(error):
            raise
        raise fault from None


def comes_from_contents(error: Exception) -> bool:
    """Return whether the contents, not the disk, caused the error. Impossible offsets in them cause EINVAL."""
    return not isinstance(error, OSError) or error.errno in (None, errno.EINVAL)


# These are not frozen: that takes three times as long, and a file may describe 300,000 of each.
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
class Part:
    """A block of a tensor, stored in one of the files."""

    file: str  # name of the file in the folder; "" for a checkpoint of one file
    start: int  # offset of the first number in the file, in bytes
    offsets: tuple[int, ...]  # in the tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in the file, in elements


@dataclass(slots=True, unsafe_hash=True)
class TensorInfo:
    """A tensor as described in the file."""

    dtype: str  # "?" if unknown
    shape: tuple[int, ...] | None  # None if unknown
    storage: StorageInfo | None  # None if the numbers are not one block
    offset: int = 0  # of the first number in the storage
    strides: tuple[int, ...] | None = None  # None if unknown; such a tensor is not mapped
    kind: str = ""  # "sparse", "quantized", the name of a subclass, ...; "" for plain numbers
    is_parameter: bool = field(default=False, compare=False)  # or requires gradients, or has attributes
    parts: tuple[Part, ...] = ()  # where its numbers are, if they are in several places
    laid_out: tuple[int, ...] = ()  # the shape that the parts fill: the tensor's own, or a flat one


def plain_tensor(dtype: str, shape: tuple[int, ...], start: int) -> TensorInfo:
    """Describe a tensor whose numbers are a block of its own, in order, from this byte of the file on; any will do."""
    strides = (1, *itertools.accumulate(reversed(shape), operator.mul))[: len(shape)]
    part = Part("", start, (0,) * len(shape), shape, strides[::-1])
    return TensorInfo(dtype, shape, None, parts=(part,), laid_out=shape)


def are_sizes(numbers: Sequence[Any]) -> bool:
    """Return whether these are valid sizes, offsets or strides: non-negative integers below 2 ** 63."""
    return not numbers or ({*map(type, numbers)} == {int} and min(numbers) >= 0 and max(numbers) < 2**63)


def is_shape(sizes: Sequence[Any]) -> bool:
    """Return whether a tensor can have this shape: torch multiplies sizes even if one of them is 0."""
    return len(sizes) <= _MAX_DIMENSIONS and are_sizes(sizes) and math.prod(filter(None, sizes)) < 2**63


_CHUNK_BYTES = 16 << 20


class Record(NamedTuple):
    """A record of an open file, not compressed."""

    file: BinaryIO
    name: str
    start: int  # offset of its first byte
    size_bytes: int
    crc: int  # torch writes 0 after set_crc32_options(False)

    def read(self) -> bytes:
        """Return the bytes of the record."""
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the record in chunks; raise at the end if its checksum is wrong."""
        crc, left = 0, self.size_bytes
        self.file.seek(self.start)
        while left and (chunk := self.file.read(min(left, _CHUNK_BYTES))):
            crc = zlib.crc32(chunk, crc)
            left -= len(chunk)
            yield chunk
        if left or self.crc not in (crc, 0):
            raise damaged(f"the checksum of the record {printable(self.name)} is wrong")


@dataclass(frozen=True)
class Structure:
    """The described contents of a file or a folder of shards."""

    file: Any  # open while it is used; None for a folder
    path: str
    size_bytes: int
    format: str  # to print: "zip", "legacy", "TorchScript", "safetensors", ...
    content: Any  # as returned by torch.load, but with descriptions instead of tensors and other objects
    globals: set[str]  # as in InertUnpickler
    devices: set[str]  # that it was saved from
    records: Mapping[str, Record] = field(default_factory=dict)  # of a zip file that torch can map
    places: Mapping[str, int] = field(default_factory=dict)  # offsets of storages
    shards: Mapping[str, Structure] = field(default_factory=dict)  # by name, the files of a folder
    loaded: Sequence[str] = ()  # shards with other contents than numbers
    # Takes the contents of these, described or loaded; None for a file by torch.
    assemble: Callable[[Mapping[str, Any]], Any] | None = None

    @property
    def name(self) -> str:
        """The name of the file in its folder."""
        return os.path.basename(self.path)

    @property
    def files(self) -> Iterable[Structure]:
        """The file itself, or the files of the folder."""
        return self.shards.values() or [self]

    @property
    def has_checksums(self) -> bool:
        """Whether damaged weights can be detected; not in safetensors or in files from before torch 1.6."""
        return all(any(record.crc for record in file.records.values()) for file in self.files)


def compare_with_checksums(structure: Structure) -> None:
    """Read all files, and compare them with their checksums, if they have any."""
    for file in structure.files:
        with faults_of(file.path):
            for record in file.records.values():
                for _ in record.chunks():
                    pass
