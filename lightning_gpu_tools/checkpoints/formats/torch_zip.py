"""The format of torch since 1.6: a zip archive with a pickle, and a record for each storage."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from io import BytesIO
from typing import BinaryIO

from lightning_gpu_tools.checkpoints.content import BYTES_OF_DTYPE, StorageInfo
from lightning_gpu_tools.checkpoints.faults import RESTORE, Fault, damaged
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.checkpoints.pickle_structure import StructureReader
from lightning_gpu_tools.checkpoints.structure import Structure
from lightning_gpu_tools.checkpoints.zip_records import Record, read_records
from lightning_gpu_tools.units import format_bytes, printable

DAMAGE = "is damaged: the description of its contents (data.pkl) and the contents do not agree"
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


def recognizes(head: bytes) -> bool:
    """Whether a file begins like a zip archive."""
    return head.startswith(b"PK\x03\x04")


def describe(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Describe the pickle in it, and check it against the records."""
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


def check_byte_order(structure: Structure) -> None:
    """Check that numbers can be taken from a file as they are."""
    if is_byte_swapped(structure):
        advice = "Load it with the tool that wrote it, and save it as safetensors."
        raise Fault("was written on a machine with another byte order", advice)
