"""Hugging Face's formats: safetensors, a JSON header and then the numbers; and shards with an index."""

import json
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.formats import INDEX, Folder
from lightning_gpu_tools.checkpoints.key_tree import list_groups, listed
from lightning_gpu_tools.checkpoints.structure import (
    BYTES_OF_DTYPE,
    RESTORE,
    Fault,
    Structure,
    TensorInfo,
    are_sizes,
    is_shape,
    plain_tensor,
)
from lightning_gpu_tools.units import printable

_MAX_HEADER_BYTES = 100_000_000  # as in the format's own library
DTYPE_OF_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
PART = re.compile(r".+-\d{5}-of-(?!00001\.)\d{5}\.\w+")  # model-00001-of-00002.safetensors
FILES = re.compile(rf"{INDEX.pattern}|{PART.pattern}")
DAMAGE = "it is not an index of shards"
_MAX_INDEX_BYTES = 128 << 20  # a million weights


def recognizes(head: bytes) -> bool:
    """Return whether a file begins with the length of a header and the header itself."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_HEADER_BYTES


def describe(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Describe a file. Checks it as strictly as the library of https://huggingface.co/docs/safetensors#format."""
    file.seek(0)
    length = struct.unpack("<Q", file.read(8))[0]
    if length + 8 > size_bytes:
        raise ValueError("cut short within the header")
    header = json.loads(file.read(length).decode(), object_pairs_hook=_without_repeats)
    start = 8 + length
    header.pop("__metadata__", None)
    content: dict[str, TensorInfo] = {}
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
        if math.prod(shape) * BYTES_OF_DTYPE[dtype] != last - first:
            raise ValueError("a shape that does not match its numbers")
        content[name] = plain_tensor(dtype, shape, start + first)
    if start + end != size_bytes:
        raise ValueError("bytes that belong to no tensor")
    return Structure(file, path, size_bytes, "safetensors", content, set(), {"cpu"}, assemble=lambda _: content)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse a repeated name, for which most readers take the last value."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a duplicate name")
    return unique


def describe_folder(folder: Folder) -> Structure:
    """Describe the shards that the index in a folder lists."""
    indexes = sorted(filter(INDEX.fullmatch, folder.names))
    if len(indexes) > 1:
        raise Fault("is a folder", f"It holds {len(indexes)} checkpoints. Use one of them: {listed(indexes)}")
    if not indexes:
        raise Fault("holds shards of a checkpoint without their index", "Copy or download all files.")
    text = folder.open(indexes[0]).read(_MAX_INDEX_BYTES)  # longer text is cut, and so no index
    file_of: dict[str, str] = dict(json.loads(text, object_pairs_hook=_without_repeats)["weight_map"])
    if not file_of or not all(isinstance(name, str) for name in file_of.values()):
        raise ValueError("no names of files")
    files = folder.check_names(file_of.values())
    shards = {shard: folder.describe(shard) for shard in files}
    return folder.assembled(shards[files[0]].format, shards, files, lambda contents: _merged(file_of, contents))


def _merged(file_of: Mapping[str, str], contents: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the weights of all shards in the order of the index, if it agrees with them."""
    for name, content in contents.items():
        held = content.keys() if isinstance(content, Mapping) else set()
        wanted = {key for key, file in file_of.items() if file == name}
        for keys, verb in ((wanted - held, "does not hold"), (held - wanted, "also holds")):
            if keys:
                shown = list_groups(sorted(map(str, keys)))
                raise Fault(f"does not match its shards: {printable(name)} {verb} {shown}", RESTORE)
    return OrderedDict((key, contents[file][key]) for key, file in file_of.items())
