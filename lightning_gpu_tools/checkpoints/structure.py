"""What is inside a checkpoint file, without its weights, without torch and without running any code of it.

Everything that opens a file for its contents comes through here first: what the file declares is checked against what
it holds, on the same open file that is then verified and loaded.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.descriptions import BYTES_OF_DTYPE, StorageInfo, TensorInfo, are_sizes
from lightning_gpu_tools.checkpoints.envelope import check_contents
from lightning_gpu_tools.checkpoints.formats import (
    RESTORE,
    Fault,
    Format,
    broken,
    comes_from_contents,
    damaged,
    identify,
)
from lightning_gpu_tools.checkpoints.key_groups import listed
from lightning_gpu_tools.checkpoints.pickle_structure import StructureReader
from lightning_gpu_tools.checkpoints.zip_records import Record, read_chunks, read_records
from lightning_gpu_tools.units import format_bytes, printable

DTYPE_OF_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "F4": "float4_e2m1fn_x2",
}  # fmt: skip
# Safetensors counts each of the two numbers, torch the byte that they share.
TWO_IN_A_BYTE = "float4_e2m1fn_x2"
# A description longer than this is no description: 10 million keys need about 1 GB.
_MAX_DESCRIPTION_BYTES = 1 << 30
# A compressed description may be longer than its file: a tensor takes some 300 bytes in it, and 150 in the zip's index.
_MAX_DESCRIPTION_RATIO = 4
_MIN_DESCRIPTION_LIMIT_BYTES = 4 << 20
# Records that say how to read the others, and what may be in them.
_NOTES = {
    "version": re.compile(rb"\d+\s*"),
    ".data/version": re.compile(rb"\d+\s*"),
    "byteorder": re.compile(rb"little|big"),
    ".storage_alignment": re.compile(rb"\d+"),
    ".data/serialization_id": re.compile(rb"[ -~]*"),
}


@dataclass(frozen=True)
class Structure:
    """What a file holds.

    Attributes:
        path: The file.
        size_bytes: Its size.
        format: How it is written.
        content: What ``torch.load`` would return, with descriptions in place of tensors and other objects.
        globals: Every class and function that opening it would look up, ``module.name``; ``module.name(...)`` is a call
            that plain data never needs.
        devices: What its numbers were saved from, ``"cuda:2"``.
        metadata: The text entries of a safetensors file; empty for others.
        records: The records of a zip file, by name; empty for others.
        places: Where each block of numbers that is not compressed begins in the file, by the key of its storage.
        filled: Classes of objects into which elements are put; ``weights_only=True`` does that with plain ones alone.
        part: What the file is if it is one shard of a checkpoint; ``None`` if it is a whole.
        assembly: Of which files it is made; ``None`` for a file.
    """

    path: str
    size_bytes: int
    format: Format
    content: Any
    globals: frozenset[str]
    devices: frozenset[str]
    metadata: Mapping[str, str] = field(default_factory=dict)
    records: Mapping[str, Record] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    filled: frozenset[str] = frozenset()
    part: Fault | None = None
    assembly: Assembly | None = None

    @functools.cached_property
    def entries(self) -> dict[str, Mapping[str, Any]]:
        """Every set of weights in it, by the name of its entry; ``""`` if they are all that it holds."""
        return check_contents(self.content, self.path)

    def shard(self, name: str) -> Structure:
        """Return the description of one of its files; its own, if it is a file."""
        return self if self.assembly is None else self.assembly.shards[name]

    @property
    def is_packed(self) -> bool:
        """Whether something in it is compressed, so that the file must be unpacked and cannot be mapped."""
        return not all(record.is_stored for record in self.records.values())

    @property
    def has_checksums(self) -> bool:
        """Whether damage of the weights can be found: no torch file before 1.6 and no safetensors file has checksums.

        Nor has one that was saved after ``torch.serialization.set_crc32_options(False)``.
        """
        if self.assembly is not None:
            return all(shard.has_checksums for shard in self.assembly.shards.values())
        return any(record.crc for record in self.records.values())


@dataclass(frozen=True)
class Assembly:
    """How the content of several files becomes one.

    Attributes:
        shards: What each file holds, by name.
        loaded: Which of them are checkpoints that are loaded as such; of others only numbers are taken.
        assemble: Takes the contents of these, by name, described or loaded, and returns the whole.
    """

    shards: Mapping[str, Structure]
    loaded: tuple[str, ...]
    assemble: Callable[[Mapping[str, Any]], Any]


def describe(file: BinaryIO, path: str) -> Structure:
    """Read the description of an open file and check it against what the file holds."""
    try:
        format_ = identify(file)
        size_bytes = file.seek(0, os.SEEK_END)
        try:
            read = {"zip": _read_zip, "legacy": _read_legacy, "safetensors": _read_safetensors}[format_]
            with collector_paused():
                return read(file, path, size_bytes)
        except Exception as error:
            # Damaged or hostile bytes raise anything; nothing of theirs has run.
            if isinstance(error, Fault) or not comes_from_contents(error):
                raise
            raise Fault(_DAMAGE[format_], RESTORE) from None
    except Fault as fault:
        raise broken(path, fault) from None


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from going through many new objects, again and again, while they are made.

    It takes half of the time of a file with 300,000 tensors, and finds nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Takes how many bytes there are to do, and returns what takes how many were done since the last call.
Progress = Callable[[int], Callable[[int], object]]


def no_progress(_: int) -> Callable[[int], object]:
    """Show nothing."""
    return lambda _: None


def compare_with_checksums(
    file: BinaryIO, structure: Structure, advance: Callable[[int], object] = lambda _: None
) -> None:
    """Read everything in an open file that has been described and compare it with the checksums in it.

    Raises:
        BrokenCheckpointError: Something in it is damaged. Only files by ``torch.save`` since torch 1.6 have checksums;
            of others it is known only that their structure is sound.
    """
    try:
        for record in structure.records.values():
            for chunk in read_chunks(file, record):
                advance(len(chunk))
    except Fault as fault:
        raise broken(structure.path, fault) from None


_UNPACK = "If one is inside, unpack it."
_DAMAGE: Mapping[Format, str] = {
    "zip": "is damaged: the description of its contents (data.pkl) and the contents do not agree",
    "legacy": "is a damaged or cut file in torch's old format (before 1.6)",
    "safetensors": "is a damaged safetensors file: its header and its length contradict each other",
}


def _read_zip(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    root, records = read_records(file, size_bytes)
    if not root or "data.pkl" not in records:
        shown = listed([root + name for name in records], 4) or "nothing"
        advice = "Load it with numpy.load." if {name[-4:] for name in records} == {".npy"} else _UNPACK
        raise Fault(f"is a zip archive but no checkpoint; it holds {shown}", advice)
    if "constants.pkl" in records:
        raise Fault("is a TorchScript archive: a whole model, not a checkpoint", "Open it with torch.jit.load.")
    _check_notes(file, records)
    record = records["data.pkl"]
    limit = max(_MIN_DESCRIPTION_LIMIT_BYTES, _MAX_DESCRIPTION_RATIO * size_bytes)
    if record.size_bytes > min(limit, _MAX_DESCRIPTION_BYTES):
        raise Fault(f"describes its contents in {format_bytes(record.size_bytes)}, which is no description", RESTORE)
    reader = StructureReader(BytesIO(b"".join(read_chunks(file, record))), record.size_bytes)
    content = reader.load()
    found = {key: _record_of(storage, records) for key, storage in reader.storages.items()}
    return Structure(
        path,
        size_bytes,
        "zip",
        content,
        frozenset(reader.globals),
        frozenset(storage.location for storage in reader.storages.values()),
        records=records,
        places={key: record.start for key, record in found.items() if record.is_stored},
        filled=frozenset(reader.filled),
    )


def _check_notes(file: BinaryIO, records: Mapping[str, Record]) -> None:
    """Raise for what torch's reader refuses or stumbles over before it reads any contents."""
    for name, pattern in _NOTES.items():
        record = records.get(name)
        if record is None or (record.size_bytes <= 100 and pattern.fullmatch(b"".join(read_chunks(file, record)))):
            continue
        raise damaged(f"its record {name} says nothing that torch understands")
    if not records.keys() & {"version", ".data/version"}:
        raise damaged("its record version is missing")


def _record_of(storage: StorageInfo, records: Mapping[str, Record]) -> Record:
    """Return the record with the numbers of a storage, if it has as many."""
    record = records.get(f"data/{storage.key}")
    if record is None:
        raise damaged(f"the weights in its record data/{printable(storage.key)} are missing")
    excess = record.size_bytes - storage.size_bytes
    # An odd number of bytes can be the storage of wider elements.
    if not 0 <= excess < BYTES_OF_DTYPE[storage.dtype]:
        name, how = printable(storage.key), "shorter" if excess < 0 else "longer"
        raise damaged(f"its record data/{name} is {how} than the weights in it")
    return record


def _read_legacy(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    file.seek(0)
    # The magic number, the version, what machine wrote it, the contents, and the keys of the storages.
    readers = [StructureReader(file, size_bytes, legacy=number == 3) for number in range(5)]
    *_, content, keys = [reader.load() for reader in readers]
    named = frozenset().union(*(reader.globals for reader in readers))
    storages = readers[3].storages
    # torch makes the parts of a nested tensor from its numbers, which come later.
    if sorted(keys) != sorted(storages) or "torch._utils._rebuild_nested_tensor" in named:
        raise damaged("it does not hold the numbers that it describes")
    place = file.tell()
    places = {}
    for key in keys:  # each storage comes after its length in 8 bytes
        storage = storages[key]
        file.seek(place)
        length = file.read(8)
        places[key] = place + 8
        place += 8 + storage.size_bytes
        if place > size_bytes or struct.unpack("<q", length)[0] != storage.numel:
            raise Fault(_DAMAGE["legacy"], RESTORE)
    devices = frozenset(storage.location for storage in storages.values())
    filled = frozenset(readers[3].filled)
    return Structure(path, size_bytes, "legacy", content, named, devices, places=places, filled=filled)


def _read_safetensors(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Follow https://huggingface.co/docs/safetensors#format, as strictly as its own library does."""
    damage = Fault(_DAMAGE["safetensors"], RESTORE)
    file.seek(0)
    length = struct.unpack("<Q", file.read(8))[0]
    header = json.loads(file.read(length).decode(), object_pairs_hook=without_repeats)
    start = 8 + length
    metadata = header.pop("__metadata__", None) or {}
    if not all(isinstance(text, str) for text in metadata.values()):
        raise damage
    content: OrderedDict[str, TensorInfo] = OrderedDict()
    places: dict[str, int] = {}
    ranges = []
    numbers: list[Any] = []
    for name, entry in header.items():
        dtype = DTYPE_OF_SAFETENSORS.get(entry["dtype"])
        if dtype is None:
            raise Fault(f"has {printable(name)} in the type {printable(entry['dtype'])}, which torch does not have")
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        numbers += first, last, *shape
        if dtype == TWO_IN_A_BYTE:
            if shape[-1] % 2:
                raise damage
            shape = (*shape[:-1], shape[-1] // 2)
        if last > size_bytes - start:
            raise Fault(f"is cut short: the weights of {printable(name)} end beyond the end of the file", RESTORE)
        numel = math.prod(shape)
        if numel * BYTES_OF_DTYPE[dtype] != last - first:
            raise damage
        storage = StorageInfo(name, dtype, "cpu", numel)
        content[name] = TensorInfo(dtype, shape, storage)
        places[name] = start + first
        ranges.append((first, last))
    if not are_sizes(numbers):
        raise damage
    # Without gaps and overlaps: everything in the file is described, and once.
    end = 0
    for first, last in sorted(ranges):
        if first != end:
            raise damage
        end = last
    if start + end != size_bytes:
        raise damage
    return Structure(path, size_bytes, "safetensors", content, frozenset(), frozenset({"cpu"}), metadata, places=places)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return what JSON has in braces; refuse one name twice, of which most readers take the last."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name is there twice")
    return unique
