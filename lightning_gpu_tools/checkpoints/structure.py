"""What is inside a checkpoint file, without its weights, without torch and without running any code of it."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from lightning_gpu_tools.checkpoints.formats import Fault, Format, broken, comes_from_contents, explain_damage, identify
from lightning_gpu_tools.checkpoints.pickle_structure import Opaque, StorageInfo, StructureReader, TensorInfo
from lightning_gpu_tools.quantities import printable

BYTES_OF_DTYPE = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "qint8", "quint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "complex128": 16,
    "complex32": 4,
}
_DTYPE_OF_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
# A description longer than this is no description: 10 million keys need about 1 GB.
_LONGEST_DESCRIPTION_BYTES = 1 << 30
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Structure:
    """What a file holds.

    Attributes:
        path: The file.
        format: How it is written.
        content: What ``torch.load`` would return, with descriptions in place of tensors and other objects.
        globals: Every class and function that opening it would look up, ``module.name``.
        metadata: The text entries of a safetensors file; empty for others.
    """

    path: str
    format: Format
    content: Any
    globals: frozenset[str]
    metadata: Mapping[str, str]


def read_structure(path: str) -> Structure:
    """Read the description of a file's contents.

    Raises:
        CheckpointNotFoundError: There is nothing at ``path``.
        BrokenCheckpointError: The file is damaged or no checkpoint.
    """
    format_ = identify(path)
    try:
        read = {"zip": _read_zip, "legacy": _read_legacy, "safetensors": _read_safetensors}[format_]
        return read(path)
    except Exception as error:
        # Damaged or hostile bytes raise anything; nothing of theirs has run.
        if not comes_from_contents(error):
            raise
        fault = error.args[0] if isinstance(error, _Damaged) else explain_damage(path, format_)
        raise broken(path, fault) from None


def find_damage(path: str, progress: Callable[[int], None] = lambda _: None) -> str | None:
    """Read the whole file and compare it with the checksums in it.

    Args:
        path: A file whose structure can be read.
        progress: Called with the number of bytes that were read since the last call.

    Returns:
        What is damaged, or ``None``. Only files by ``torch.save`` since torch 1.6 have checksums; of others it is known
        only that their structure is sound.
    """
    if identify(path) != "zip":
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                with archive.open(record) as file:
                    # At the end of a record zipfile compares its checksum, and raises with the record's name.
                    while chunk := file.read(_CHUNK_BYTES):
                        progress(len(chunk))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError, RuntimeError, zlib.error) as error:
        if not comes_from_contents(error):
            raise
        return str(error)
    return None


class _Damaged(Exception):
    """The first argument is the :class:`Fault`."""


def _read_zip(path: str) -> Structure:
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename.partition("/")[2]: info.file_size for info in archive.infolist()}
        folder = archive.namelist()[0].partition("/")[0]
        if "constants.pkl" in sizes or "data.pkl" not in sizes or sizes["data.pkl"] > _LONGEST_DESCRIPTION_BYTES:
            raise _Damaged(explain_damage(path, "zip"))
        reader = StructureReader(BytesIO(archive.read(f"{folder}/data.pkl")))
    content = reader.load()
    for storage in reader.storages.values():
        _check_record(storage, sizes.get(f"data/{storage.key}"))
    return Structure(path, "zip", content, frozenset(reader.globals), {})


def _check_record(storage: StorageInfo, size: int | None) -> None:
    if size is None:
        raise _Damaged(Fault(f"is damaged: the weights in its record data/{printable(storage.key)} are missing"))
    if storage.numel * BYTES_OF_DTYPE.get(storage.dtype, 0) > size:
        raise _Damaged(Fault(f"is damaged: its record data/{printable(storage.key)} is shorter than the weights in it"))


def _read_legacy(path: str) -> Structure:
    with open(path, "rb") as file:
        for _ in range(3):  # magic number, protocol version, byte order
            StructureReader(file).load()
        reader = StructureReader(file)
        content = reader.load()
        keys = StructureReader(file).load()
        here = file.tell()
        size = file.seek(0, 2)
    storages = [reader.storages[str(key)] for key in keys]
    # Each block of numbers comes after its length in 8 bytes.
    if here + sum(8 + s.numel * BYTES_OF_DTYPE.get(s.dtype, 0) for s in storages) > size:
        raise _Damaged(explain_damage(path, "legacy"))
    return Structure(path, "legacy", content, frozenset(reader.globals), {})


def _read_safetensors(path: str) -> Structure:
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
        size = file.seek(0, 2)
    metadata = header.pop("__metadata__", {})
    content: OrderedDict[str, TensorInfo] = OrderedDict()
    for name, entry in header.items():
        dtype = _DTYPE_OF_SAFETENSORS.get(entry["dtype"], entry["dtype"].lower())
        start, end = entry["data_offsets"]
        if not 0 <= start <= end <= size - 8 - length:
            raise _Damaged(Fault(f"is cut short: the weights of {printable(name)} end beyond the end of the file"))
        storage = StorageInfo(name, dtype, "cpu", (end - start) // BYTES_OF_DTYPE.get(dtype, 1))
        content[name] = TensorInfo(dtype, tuple(entry["shape"]), storage)
    return Structure(path, "safetensors", content, frozenset(), {str(k): str(v) for k, v in metadata.items()})


def walk_tensors(content: Any, name: str = "") -> Iterator[tuple[str, TensorInfo]]:
    """Yield (dotted name, tensor) for every tensor anywhere in a structure's content, in the order of the file."""
    stack = [(name, content)]
    seen: set[int] = set()
    while stack:
        name, value = stack.pop()
        if isinstance(value, TensorInfo):
            yield name, value
            continue
        if id(value) in seen:
            continue
        if isinstance(value, Mapping):
            inside = [(f"{name}.{key}".lstrip("."), item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            inside = [(f"{name}.{index}".lstrip("."), item) for index, item in enumerate(value)]
        elif isinstance(value, Opaque):
            parts = (value.arguments, value.state, value.items)
            inside = [(name, part) for part in parts if isinstance(part, (Mapping, list, tuple))]
        else:
            continue
        seen.add(id(value))
        stack.extend(reversed(inside))
