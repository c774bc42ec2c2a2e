"""What is inside a checkpoint file, without its weights, without torch and without running any code of it.

Everything that opens a file for its contents comes through here first: what the file declares is checked against what
it holds, on the same open file that is then verified and loaded.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.content import all_state_dicts, likely
from lightning_gpu_tools.checkpoints.formats import (
    RESTORE,
    SUFFIXES,
    Fault,
    Format,
    broken,
    comes_from_contents,
    damaged,
    identify,
    opened,
)
from lightning_gpu_tools.checkpoints.pickle_structure import (
    BYTES_OF_DTYPE,
    StorageInfo,
    StructureReader,
    TensorInfo,
    are_sizes,
)
from lightning_gpu_tools.checkpoints.zip_records import Record, read_chunks, read_records
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError, CheckpointNotFoundError
from lightning_gpu_tools.units import format_bytes, printable, printable_path

DTYPE_OF_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
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
        records: The records of a zip file, by name; of an old file the numbers, ``data/0``; empty for safetensors.
        places: Where the numbers of each tensor of a safetensors file begin; empty for others.
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

    @property
    def is_packed(self) -> bool:
        """Whether something in it is compressed, so that the file must be unpacked and cannot be mapped."""
        return not all(record.is_stored for record in self.records.values())

    @property
    def has_checksums(self) -> bool:
        """Whether damage of the weights can be found: no torch file before 1.6 and no safetensors file has checksums.

        Nor has one that was saved after ``torch.serialization.set_crc32_options(False)``.
        """
        return any(record.crc for record in self.records.values())


def read_structure(path: str | os.PathLike[str]) -> Structure:
    """Read the description of a file's contents and check it against what the file holds.

    Args:
        path: A local path, or any URL that fsspec knows.

    Raises:
        CheckpointNotFoundError: There is nothing at ``path``.
        BrokenCheckpointError: The file is damaged or no checkpoint.
        OSError: It cannot be read.
    """
    with naming_another(path), opened(path) as file:
        return describe(file, os.fspath(path))


def verify_checkpoint(path: str | os.PathLike[str], progress: Callable[[int], None] = lambda _: None) -> Structure:
    """Do the same, then read the whole of the file and compare it with the checksums in it.

    Args:
        path: A local path, or any URL that fsspec knows.
        progress: Called with the number of bytes that were read since the last call.

    Raises:
        CheckpointNotFoundError, BrokenCheckpointError, OSError: As :func:`read_structure`.
    """
    with naming_another(path), opened(path) as file:
        structure = describe(file, os.fspath(path))
        compare_with_checksums(file, structure, progress)
        return structure


@contextlib.contextmanager
def naming_another(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add to the error about a broken or missing file which other one in its folder can be loaded instead."""
    try:
        yield
    except (BrokenCheckpointError, CheckpointNotFoundError) as error:
        place = Path(os.path.expanduser(path))
        shapes = _shapes_at_beginning(place)
        other = _newest_complete_beside(place, shapes)
        if other is not None:
            of_model = " of the same model" * (shapes is not None)
            error.args = (
                f"{error.args[0]} The newest complete checkpoint{of_model} in that folder: {printable_path(other)}",
            )
        raise


def describe(file: BinaryIO, path: str) -> Structure:
    """Read the description of an open file and check it against what the file holds.

    Raises:
        BrokenCheckpointError: The file is damaged or no checkpoint; the message names ``path``.
    """
    try:
        format_ = identify(file)
        size_bytes = os.fstat(file.fileno()).st_size
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


def compare_with_checksums(
    file: BinaryIO, structure: Structure, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Read everything in an open file that has been described and compare it with the checksums in it.

    Args:
        file: The file.
        structure: What :func:`describe` returned for it.
        progress: Called with the number of bytes that were read since the last call.

    Raises:
        BrokenCheckpointError: Something in it is damaged. Only files by ``torch.save`` since torch 1.6 have checksums;
            of others it is known only that their structure is sound.
    """
    try:
        for record in structure.records.values():
            for chunk in read_chunks(file, record):
                progress(len(chunk))
    except Fault as fault:
        raise broken(structure.path, fault) from None


_DAMAGE: Mapping[Format, str] = {
    "zip": "is damaged: the description of its contents (data.pkl) and the contents do not agree",
    "legacy": "is a damaged or cut file in torch's old format (before 1.6)",
    "safetensors": "is a damaged safetensors file: its header and its length contradict each other",
}


# Each is a part of a checkpoint, by the names that DeepSpeed, Hugging Face and torch.distributed.checkpoint give.
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\..*|.*(zero_pp|mp)_rank_.*|.*_(optim|model)_states\..*|.*\.distcp")
_MAX_NEIGHBORS = 8  # our default: whoever waits for an error message wants it soon
Shapes = frozenset[tuple[str, tuple[int, ...] | None]]


def _newest_complete_beside(path: Path, shapes: Shapes | None) -> Path | None:
    """Return the newest other whole checkpoint in a folder, of these names and shapes if they are known."""
    try:
        others = [entry for entry in path.parent.iterdir() if entry.suffix in SUFFIXES and entry.name != path.name]
        newest_first = sorted(others, key=lambda entry: entry.stat().st_mtime, reverse=True)
        whole = [entry for entry in newest_first if not _SHARD.fullmatch(entry.name)]
        for other in whole[:_MAX_NEIGHBORS]:
            with contextlib.suppress(CheckpointError), opened(other) as file:
                found = _shapes_of(describe(file, str(other)).content)
                if found is not None and shapes in (None, found):
                    return other
    except OSError:  # listing neighbors is a courtesy; the error about the file itself must come out
        pass
    return None


def _shapes_of(content: Any) -> Shapes | None:
    """Return names and shapes of the weights that are meant if nobody names any; ``None`` if there are none."""
    sets = likely(all_state_dicts(content, TensorInfo))
    tensors = [(key, value) for weights in sets.values() for key, value in weights.items() if type(value) is TensorInfo]
    is_model = any("float" in value.dtype and not value.kind for _, value in tensors)  # a generator's state is none
    return frozenset((key, value.shape) for key, value in tensors) if is_model else None


def _shapes_at_beginning(path: Path) -> Shapes | None:
    """Return what can still be read of the weights in a damaged zip file: torch writes their description first."""
    try:
        with opened(path) as file:
            head = file.read(_MIN_DESCRIPTION_LIMIT_BYTES)
        name_bytes, extra_bytes = struct.unpack_from("<2H", head, 26)  # APPNOTE.TXT 4.3.7
        start = 30 + name_bytes + extra_bytes
        if not head[30 : 30 + name_bytes].endswith(b"/data.pkl"):
            return None
        with collector_paused():
            return _shapes_of(StructureReader(BytesIO(head[start:]), len(head)).load())
    except Exception:  # noqa: BLE001 - damaged bytes raise anything, and then nothing is known
        return None


def _read_zip(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    root, records = read_records(file, size_bytes)
    if not root or "data.pkl" not in records:
        names = [printable(root + name) for name in records]
        shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        raise Fault(f"is a zip archive but no checkpoint; it holds {shown or 'nothing'}")
    if "constants.pkl" in records:
        raise Fault("is a TorchScript archive: a whole model, not a checkpoint", "Open it with torch.jit.load.")
    _check_notes(file, records)
    record = records["data.pkl"]
    limit = max(_MIN_DESCRIPTION_LIMIT_BYTES, _MAX_DESCRIPTION_RATIO * size_bytes)
    if record.size_bytes > min(limit, _MAX_DESCRIPTION_BYTES):
        raise Fault(f"describes its contents in {format_bytes(record.size_bytes)}, which is no description", RESTORE)
    reader = StructureReader(BytesIO(b"".join(read_chunks(file, record))), record.size_bytes)
    content = reader.load()
    for storage in reader.storages.values():
        _check_record(storage, records.get(f"data/{storage.key}"))
    devices = frozenset(storage.location for storage in reader.storages.values())
    return Structure(path, size_bytes, "zip", content, frozenset(reader.globals), devices, records=records)


def _check_notes(file: BinaryIO, records: Mapping[str, Record]) -> None:
    """Raise for what torch's reader refuses or stumbles over before it reads any contents."""
    for name, pattern in _NOTES.items():
        record = records.get(name)
        if record is None or (record.size_bytes <= 100 and pattern.fullmatch(b"".join(read_chunks(file, record)))):
            continue
        raise damaged(f"its record {name} says nothing that torch understands")
    if not records.keys() & {"version", ".data/version"}:
        raise damaged("its record version is missing")


def _check_record(storage: StorageInfo, record: Record | None) -> None:
    excess = -1 if record is None else record.size_bytes - storage.size_bytes
    # An odd number of bytes can be the storage of wider elements.
    if record is not None and 0 <= excess < BYTES_OF_DTYPE[storage.dtype]:
        return
    name = f"data/{printable(storage.key)}"
    what = f"its record {name} is {'shorter' if excess < 0 else 'longer'} than the weights in it"
    if record is None:
        what = f"the weights in its record {name} are missing"
    raise damaged(what)


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
    records = {}
    for key in keys:  # each storage comes after its length in 8 bytes
        storage = storages[key]
        file.seek(place)
        length = file.read(8)
        name = f"data/{key}"
        records[name] = Record(name, place + 8, storage.size_bytes, storage.size_bytes, crc=0, is_stored=True)
        place += 8 + storage.size_bytes
        if place > size_bytes or struct.unpack("<q", length)[0] != storage.numel:
            raise Fault(_DAMAGE["legacy"], RESTORE)
    devices = frozenset(storage.location for storage in storages.values())
    return Structure(path, size_bytes, "legacy", content, named, devices, records=records)


def _read_safetensors(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Follow https://huggingface.co/docs/safetensors#format, as strictly as its own library does."""
    damage = Fault(_DAMAGE["safetensors"], RESTORE)
    file.seek(0)
    length = struct.unpack("<Q", file.read(8))[0]
    header = json.loads(file.read(length).decode(), object_pairs_hook=_without_repeats)
    start = 8 + length
    metadata = header.pop("__metadata__", None) or {}
    if not all(isinstance(text, str) for text in metadata.values()):
        raise damage
    content: OrderedDict[str, TensorInfo] = OrderedDict()
    places: dict[str, int] = {}
    ranges = []
    numbers: list[Any] = []
    for name, entry in header.items():
        dtype = DTYPE_OF_SAFETENSORS[entry["dtype"]]
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        numbers += first, last, *shape
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


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name is there twice")
    return unique
