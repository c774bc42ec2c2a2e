"""What is inside a checkpoint file, read without its weights, without torch and without running any of it."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.content import (
    BYTES_OF_DTYPE,
    LIGHTNING_VERSION,
    MANIFEST,
    MAX_DEPTH,
    Opaque,
    StandIn,
    StorageInfo,
    TensorInfo,
    all_state_dicts,
    are_sizes,
    describe_content,
)
from lightning_gpu_tools.checkpoints.formats import (
    RESTORE,
    Fault,
    Format,
    Record,
    any_error_is,
    damaged,
    faults_of,
    identify,
    read_records,
)
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.checkpoints.pickle_structure import StructureReader
from lightning_gpu_tools.errors import BrokenCheckpointError
from lightning_gpu_tools.units import format_bytes, printable, printable_path

# The entries that load_from_checkpoint and Trainer read beside the weights.
HYPERPARAMETERS_FORM = ("hparams_name", "hparams_type")


def check_contents(content: Any, path: object) -> dict[str, Mapping[str, Any]]:
    """Return what ``all_state_dicts`` returns, with keys and versions of the right type."""
    with faults_of(path):
        entries = all_state_dicts(content)
    for entry, weights in entries.items():
        where = f'"{printable(entry)}" of {printable_path(path)}' if entry else printable_path(path)
        for key in weights:
            if not isinstance(key, str):
                is_object = isinstance(key, (Opaque, StandIn))
                what = f"{describe_content(key)}, not opened" if is_object else f"of type {type(key).__name__}"
                raise BrokenCheckpointError(
                    f"{where} has weights without a name: {'a key' if is_object else f'the key {printable(key)}'} is "
                    f"{what}. Save the state_dict of a module."
                )
            if key.count(".") > MAX_DEPTH:
                raise BrokenCheckpointError(
                    f"{where} has the key {printable(key)} of {key.count('.')} levels. No model is nested more than "
                    f"{MAX_DEPTH} levels deep."
                )
        if not are_versions(getattr(weights, "_metadata", None)):
            raise BrokenCheckpointError(
                f"{where} has wrong _metadata: torch keeps the version of each module there, as a whole number. Delete "
                "that attribute of the state_dict and save it again."
            )
    return entries


def check_entries(checkpoint: Mapping[Any, Any], path: object, names: Iterable[str]) -> None:
    """Check the types of entries of a Lightning checkpoint before they are used."""
    for name in names:
        is_right, wanted = _ENTRIES[name]
        if name in checkpoint and not is_right(checkpoint[name]):
            value = checkpoint[name]
            raise BrokenCheckpointError(
                f'"{name}" of {printable_path(path)} must be {wanted}, but is {printable(value)} of type '
                f"{type(value).__name__}. Put it right or take it out, and save the checkpoint again."
            )


def manifest_of(content: Any) -> dict[str, Any]:
    """Return what this package has noted in a checkpoint, without what others have put there."""
    manifest = content.get(MANIFEST) if isinstance(content, Mapping) else None
    if not isinstance(manifest, Mapping):
        return {}
    return {
        name: manifest[name]
        for name, is_right in _ENVELOPE_NOTES.items()
        if name in manifest and is_right(manifest[name])
    }


def are_versions(metadata: Any) -> bool:
    """Whether this can be the ``_metadata`` of a state_dict: the version of each module."""
    return metadata is None or (
        isinstance(metadata, dict)
        and is_named(metadata)
        and all(isinstance(entry, dict) for entry in metadata.values())
        and all(isinstance(entry.get("version"), (int, type(None))) for entry in metadata.values())
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_named(value: Any) -> bool:
    """Whether this is a dictionary with names for keys."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


# The types that Lightning reads, which are more than it writes: LightningModule.load_from_checkpoint
_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    LIGHTNING_VERSION: (_is_text, "text"),
    "hyper_parameters": (is_named, "a dictionary with names for keys"),
    "hparams_name": (lambda value: value is None or _is_text(value), "text"),
    "hparams_type": (
        lambda value: value is None or _is_text(value) or (isinstance(value, type) and issubclass(value, Mapping)),
        "a class of dictionaries",
    ),
}
_ENVELOPE_NOTES: dict[str, Callable[[Any], bool]] = {
    "wrappers": lambda value: is_named(value) and all(map(_is_text, value.values())),
    "devices": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "torch": _is_text,
    "lightning": _is_text,
}


DTYPE_OF_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "F4": "float4_e2m1fn_x2",
}  # fmt: skip
TWO_IN_A_BYTE = "float4_e2m1fn_x2"  # safetensors counts each number, torch the byte that two share
_MAX_DESCRIPTION_BYTES = 1 << 30  # enough for 10 million keys
# Compressed, it may be longer than its file: a tensor takes 300 bytes in it, and 150 in the zip's index.
_MAX_DESCRIPTION_RATIO = 4
_MIN_DESCRIPTION_LIMIT_BYTES = 4 << 20
# What may be in records that say how to read the others.
_NOTES = {
    "version": re.compile(rb"\d+\s*"),
    ".data/version": re.compile(rb"\d+\s*"),
    "byteorder": re.compile(rb"little|big"),
    ".storage_alignment": re.compile(rb"\d+"),
    ".data/serialization_id": re.compile(rb"[ -~]*"),
}


@dataclass(frozen=True)
class Structure:
    """What a file, or a folder of shards, holds."""

    file: Any  # open as long as it is used; None of a folder
    path: str
    size_bytes: int
    format: Format
    content: Any  # as torch.load would return it, with descriptions in place of tensors and other objects
    globals: set[str]  # as in StructureReader
    devices: set[str]  # from which it was saved
    metadata: Mapping[str, str] = field(default_factory=dict)  # of a safetensors file
    records: Mapping[str, Record] = field(default_factory=dict)  # of a zip file
    places: Mapping[str, int] = field(default_factory=dict)  # offsets of storages that are not compressed
    filled: set[str] = field(default_factory=set)  # as in StructureReader
    part: Fault | None = None  # what it is, if it is one shard of a checkpoint
    assembly: Assembly | None = None  # of a folder

    @property
    def name(self) -> str:
        """The name of the file in its folder."""
        return os.path.basename(self.path)

    @functools.cached_property
    def entries(self) -> dict[str, Mapping[str, Any]]:
        """Every set of weights, by the name of its entry; ``""`` if it holds nothing else."""
        return check_contents(self.content, self.path)

    @property
    def files(self) -> Iterable[Structure]:
        """It, or the files of the folder."""
        return [self] if self.assembly is None else self.assembly.shards.values()

    @property
    def is_packed(self) -> bool:
        """Whether something in it is compressed, so that it cannot be mapped."""
        return not all(record.is_stored for record in self.records.values())

    @property
    def has_checksums(self) -> bool:
        """Whether damaged weights can be found; not in safetensors and files before torch 1.6."""
        return all(any(record.crc for record in file.records.values()) for file in self.files)


@dataclass(frozen=True)
class Assembly:
    """How the content of several files becomes one."""

    shards: Mapping[str, Structure]
    loaded: tuple[str, ...]  # from others only numbers are taken
    assemble: Callable[[Mapping[str, Any]], Any]  # gets the contents of these, described or loaded


def describe(file: BinaryIO, path: str) -> Structure:
    """Read the description of an open file and check it against what the file holds."""
    with faults_of(path):
        read, damage = _READERS[identify(file)]
        with collector_paused(), any_error_is(Fault(damage, RESTORE)):
            return read(file, path, file.seek(0, os.SEEK_END))


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector while many objects are made: it takes half the time and finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Gets the total number of bytes, and returns what gets the number done since its last call.
Progress = Callable[[int], Callable[[int], object]]


def no_progress(_: int) -> Callable[[int], object]:
    """Show no progress."""
    return lambda _: None


def compare_with_checksums(structure: Structure, advance: Callable[[int], object] = lambda _: None) -> None:
    """Read all of a file and compare it with its checksums, if it has any."""
    with faults_of(structure.path):
        for record in structure.records.values():
            for chunk in record.chunks():
                advance(len(chunk))


def _read_zip(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    root, records = read_records(file, size_bytes)
    if not root or "data.pkl" not in records:
        shown = listed([root + name for name in records], 4) or "nothing"
        is_npz = {name[-4:] for name in records} == {".npy"}
        advice = "Load it with numpy.load." if is_npz else "If one is inside, unpack it."
        raise Fault(f"is a zip archive but no checkpoint; it holds {shown}", advice)
    if "constants.pkl" in records:
        raise Fault("is a TorchScript archive, not a checkpoint", "Open it with torch.jit.load.")
    _check_notes(records)
    record = records["data.pkl"]
    limit = max(_MIN_DESCRIPTION_LIMIT_BYTES, _MAX_DESCRIPTION_RATIO * size_bytes)
    if record.size_bytes > min(limit, _MAX_DESCRIPTION_BYTES):
        raise Fault(f"describes its contents in {format_bytes(record.size_bytes)}, which is no description", RESTORE)
    reader = StructureReader(BytesIO(record.read()), record.size_bytes)
    content = reader.load()
    found = {key: _record_of(storage, records) for key, storage in reader.storages.items()}
    return Structure(
        file,
        path,
        size_bytes,
        "zip",
        content,
        reader.globals,
        {storage.location for storage in reader.storages.values()},
        records=records,
        places={key: record.start for key, record in found.items() if record.is_stored},
        filled=reader.filled,
    )


def _check_notes(records: Mapping[str, Record]) -> None:
    """Raise for what torch's reader refuses or stumbles over."""
    for name in _NOTES.keys() & records.keys():
        if records[name].size_bytes > 100 or not _NOTES[name].fullmatch(records[name].read()):
            raise damaged(f"its record {name} says nothing that torch understands")
    if not records.keys() & {"version", ".data/version"}:
        raise damaged("its record version is missing")


def is_byte_swapped(structure: Structure) -> bool:
    """Whether a machine with the other byte order wrote a zip file."""
    record = structure.records.get("byteorder")
    return record is not None and record.read() != sys.byteorder.encode()


def _record_of(storage: StorageInfo, records: Mapping[str, Record]) -> Record:
    record = records.get(f"data/{storage.key}")
    if record is None:
        raise damaged(f"the weights in its record data/{printable(storage.key)} are missing")
    excess = record.size_bytes - storage.size_bytes
    if not 0 <= excess < BYTES_OF_DTYPE[storage.dtype]:  # a storage need not end with a whole element
        name, how = printable(storage.key), "shorter" if excess < 0 else "longer"
        raise damaged(f"its record data/{name} is {how} than the weights in it")
    return record


def _read_legacy(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    file.seek(0)
    # The magic number, the version, what machine wrote it, the contents, and the keys of the storages.
    readers = [StructureReader(file, size_bytes, legacy=number == 3) for number in range(5)]
    *_, content, keys = [reader.load() for reader in readers]
    named = set().union(*(reader.globals for reader in readers))
    storages = readers[3].storages
    # To rebuild nested tensors torch needs the numbers, which come later.
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
            raise ValueError("cut short, or a storage of another length")
    devices = {storage.location for storage in storages.values()}
    return Structure(file, path, size_bytes, "legacy", content, named, devices, places=places, filled=readers[3].filled)


def _read_safetensors(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Follow https://huggingface.co/docs/safetensors#format, as strictly as its own library does."""
    file.seek(0)
    length = struct.unpack("<Q", file.read(8))[0]
    header = json.loads(file.read(length).decode(), object_pairs_hook=without_repeats)
    start = 8 + length
    metadata = header.pop("__metadata__", None) or {}
    if not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("metadata that is no text")
    content: dict[str, TensorInfo] = {}
    places: dict[str, int] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = DTYPE_OF_SAFETENSORS.get(entry["dtype"])
        if dtype is None:
            raise Fault(f"has {printable(name)} in the type {printable(entry['dtype'])}, which torch does not have")
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not are_sizes((first, last, *shape)) or first != end:  # everything in the file is described, and once
            raise ValueError("a gap, an overlap, or no sizes")
        end = last
        if dtype == TWO_IN_A_BYTE:
            if shape[-1] % 2:
                raise ValueError("half of a byte")
            shape = (*shape[:-1], shape[-1] // 2)
        if last > size_bytes - start:
            raise Fault(f"is cut short: the weights of {printable(name)} end beyond the end of the file", RESTORE)
        numel = math.prod(shape)
        if numel * BYTES_OF_DTYPE[dtype] != last - first:
            raise ValueError("another shape than its numbers")
        storage = StorageInfo(name, dtype, "cpu", numel)
        content[name] = TensorInfo(dtype, shape, storage)
        places[name] = start + first
    if start + end != size_bytes:
        raise ValueError("bytes that belong to nothing")
    return Structure(file, path, size_bytes, "safetensors", content, set(), {"cpu"}, metadata, places=places)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse a name that is there twice, of which most readers take the last."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name is there twice")
    return unique


# How each format is read, and what is wrong with a file if that raises anything but a fault.
_READERS: dict[str, tuple[Callable[[BinaryIO, str, int], Structure], str]] = {
    "zip": (_read_zip, "is damaged: the description of its contents (data.pkl) and the contents do not agree"),
    "legacy": (_read_legacy, "is a damaged or cut file in torch's old format (before 1.6)"),
    "safetensors": (
        _read_safetensors,
        "is a damaged safetensors file: its header and its length contradict each other",
    ),
}
