"""The safetensors format: a JSON header, then the numbers."""

from __future__ import annotations

import itertools
import json
import math
import operator
import struct
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.structure import (
    BYTES_OF_DTYPE,
    Fault,
    StorageInfo,
    Structure,
    TensorInfo,
    are_sizes,
    is_shape,
)
from lightning_gpu_tools.units import printable

NAME = "safetensors"
_MAX_HEADER_BYTES = 100_000_000  # as in the format's own library
DTYPE_OF_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip


def recognizes(head: bytes) -> bool:
    """Return whether a file begins with the length of a header and the header itself."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_HEADER_BYTES


def describe(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Describe a file. Checks it as strictly as the library of https://huggingface.co/docs/safetensors#format."""
    file.seek(0)
    length = struct.unpack("<Q", file.read(8))[0]
    if length + 8 > size_bytes:
        raise ValueError("cut short within the header")
    header = json.loads(file.read(length).decode(), object_pairs_hook=without_repeats)
    start = 8 + length
    header.pop("__metadata__", None)
    content: dict[str, TensorInfo] = {}
    places: dict[str, int] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = DTYPE_OF_SAFETENSORS.get(entry["dtype"])
        if dtype is None:
            raise Fault(f"has {printable(name)} of type {printable(entry['dtype'])}, which is not supported")
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        # Everything in the file is described exactly once.
        if not are_sizes((first, last)) or not is_shape(shape) or first != end:
            raise ValueError("a gap, an overlap, or no sizes")
        end = last
        numel = math.prod(shape)
        if numel * BYTES_OF_DTYPE[dtype] != last - first:
            raise ValueError("a shape that does not match its numbers")
        storage = StorageInfo(name, dtype, "cpu", numel)
        strides = (1, *itertools.accumulate(reversed(shape), operator.mul))[: len(shape)]
        content[name] = TensorInfo(dtype, shape, storage, 0, strides[::-1])
        places[name] = start + first
    if start + end != size_bytes:
        raise ValueError("bytes that belong to no tensor")
    return Structure(file, path, size_bytes, NAME, content, set(), {"cpu"}, places=places, is_of_torch=False)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse a repeated name, for which most readers take the last value."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a duplicate name")
    return unique
