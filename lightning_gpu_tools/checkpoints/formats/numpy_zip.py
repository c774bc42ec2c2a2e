"""NumPy's archives of arrays, ``.npz``: a zip file with a header and the numbers of each array."""

from __future__ import annotations

import ast
import math
import struct
from collections import OrderedDict
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.arrays import ARRAY, dtype_of_array, strides_of
from lightning_gpu_tools.checkpoints.faults import Fault
from lightning_gpu_tools.checkpoints.file_kinds import other_file
from lightning_gpu_tools.checkpoints.structure import (
    Opaque,
    StorageInfo,
    Structure,
    TensorInfo,
    is_shape,
)
from lightning_gpu_tools.checkpoints.zip_records import Record, read_index, read_records
from lightning_gpu_tools.units import printable_path

NAME = "npz"
SUFFIXES = (".npz",)
HOLDS_ONLY_WEIGHTS = True
_LOCAL_HEADER_BYTES = 30  # of a zip file's first record, before its name
_MAX_HEADER_BYTES = 10_000  # of an array; as in NumPy


def recognizes(head: bytes) -> bool:
    """Return whether a file begins like a zip archive whose first record is an array."""
    if not head.startswith(b"PK\x03\x04") or len(head) < _LOCAL_HEADER_BYTES:
        return False
    end_of_name = _LOCAL_HEADER_BYTES + int.from_bytes(head[26:28], "little")
    return head[:end_of_name].endswith(b".npy")


def describe(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Describe the header of each array, and check it against the size of its record."""
    index = read_index(file, size_bytes)
    names = [entry.name for entry in index.entries]
    if not all(name.endswith(".npy") for name in names):
        raise other_file(path, size_bytes, b"PK", names)
    if any(entry.is_compressed for entry in index.entries):
        plain = f"numpy.savez('weights.npz', **numpy.load({printable_path(path)!r}))"
        raise Fault("is compressed by numpy.savez_compressed", f"Save it again without compression: {plain}")
    root, records = read_records(index)
    content: dict[str, Any] = {}
    places: dict[str, int] = {}
    for name, record in records.items():
        key = (root + name).removesuffix(".npy")
        header, length = _read_header(record)
        shape, dtype = header["shape"], _dtype(header["descr"])
        if not dtype:
            content[key] = Opaque(kind=ARRAY)
            continue
        if not isinstance(shape, tuple) or not is_shape(shape):
            raise ValueError("no shape")
        storage = StorageInfo(key, dtype, "cpu", math.prod(shape))
        if length + storage.size_bytes != record.size_bytes:
            raise ValueError("another shape than its numbers")
        strides = strides_of(shape, is_fortran=header["fortran_order"] is True)
        content[key] = TensorInfo(dtype, shape, storage, 0, strides)
        places[key] = record.start + length
    if not places:
        raise Fault("holds no arrays of numbers that torch has")
    others = {ARRAY} if len(places) < len(content) else set()
    return Structure(file, path, size_bytes, NAME, content, others, set(), records=records, places=places)


def load(structure: Structure, map_location: Any, weights_only: bool) -> OrderedDict[str, Any]:
    """Return the arrays of numbers as tensors, mapped to the file where their place in it allows this."""
    import torch

    from lightning_gpu_tools.checkpoints.file_tensors import dtype_of, mapped_bytes, moved

    numbers = mapped_bytes(structure.file)
    weights: OrderedDict[str, Any] = OrderedDict()
    for key, start in structure.places.items():
        info = structure.content[key]
        dtype = dtype_of(info.dtype)
        part = numbers[start : start + info.storage.size_bytes]
        if start % dtype.itemsize:  # torch reads aligned numbers only
            part = part.clone()
        weights[key] = moved(torch.as_strided(part.view(dtype), info.shape, info.strides), map_location)
    return weights


def _read_header(record: Record) -> tuple[dict[str, Any], int]:
    """Return the header of an array and its length, as numpy.lib.format has it."""
    record.file.seek(record.start)
    start = record.file.read(8)
    length_format = {b"\x93NUMPY\1\0": "<H", b"\x93NUMPY\2\0": "<L", b"\x93NUMPY\3\0": "<L"}[start]
    size_bytes = struct.calcsize(length_format)
    (length,) = struct.unpack(length_format, record.file.read(size_bytes))
    if length > min(_MAX_HEADER_BYTES, record.size_bytes):
        raise ValueError("a header that is too long")
    header: dict[str, Any] = ast.literal_eval(record.file.read(length).decode())
    return header, len(start) + size_bytes + length


def _dtype(described: Any) -> str:
    return dtype_of_array(described[:1], described[1:]) if isinstance(described, str) else ""
