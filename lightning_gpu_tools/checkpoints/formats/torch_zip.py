"""The format of torch since 1.6: a zip archive with a pickle and one record for each storage."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from io import BytesIO
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.faults import Fault
from lightning_gpu_tools.checkpoints.formats import numpy_zip
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.checkpoints.pickle_structure import StructureReader
from lightning_gpu_tools.checkpoints.structure import BYTES_OF_DTYPE, StorageInfo, Structure
from lightning_gpu_tools.checkpoints.zip_records import Record, read_records

NAME = "zip"
SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
HOLDS_ONLY_WEIGHTS = False


def recognizes(head: bytes) -> bool:
    """Return whether a file begins like a zip archive, but not like NumPy's."""
    return head.startswith(b"PK\x03\x04") and not numpy_zip.recognizes(head)


def describe(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Describe the pickle in the archive, and check it against the records."""
    root, records = read_records(file, size_bytes)
    if not root or "data.pkl" not in records:
        shown = listed([root + name for name in records], 4) or "nothing"
        raise Fault(f"is a zip archive but not a checkpoint; it holds {shown}", "If a checkpoint is inside, unpack it.")
    if "constants.pkl" in records:
        raise Fault("is a TorchScript archive, not a checkpoint", "Open it with torch.jit.load.")
    if "byteorder" in records and records["byteorder"].read() != sys.byteorder.encode():
        advice = "On that machine, load it and save it as safetensors."
        raise Fault("was written on a machine with another byte order", advice)
    record = records["data.pkl"]
    reader = StructureReader(BytesIO(record.read()), record.size_bytes)
    content = reader.load()
    return Structure(
        file,
        path,
        size_bytes,
        NAME,
        content,
        reader.globals,
        {storage.location for storage in reader.storages.values()},
        records=records,
        places={key: _start_of(storage, records) for key, storage in reader.storages.items()},
        filled=reader.filled,
    )


def load(structure: Structure, map_location: Any, weights_only: bool) -> Any:
    """Build the described content, or let torch load it; tensors are mapped either way."""
    from lightning_gpu_tools.checkpoints.torch_loading import load_by_torch

    return load_by_torch(structure, map_location, weights_only, can_be_mapped=True)


def _start_of(storage: StorageInfo, records: Mapping[str, Record]) -> int:
    record = records[f"data/{storage.key}"]
    if not 0 <= record.size_bytes - storage.size_bytes < BYTES_OF_DTYPE[storage.dtype]:  # at most part of an element
        raise ValueError("a record of another length than its storage")
    return record.start
