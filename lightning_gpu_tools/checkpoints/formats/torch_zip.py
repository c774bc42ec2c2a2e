"""The format of torch since 1.6: a zip archive with a pickle and one record for each storage."""

from __future__ import annotations

import re
import sys
from io import BytesIO
from typing import BinaryIO
from zipfile import ZIP_STORED

from lightning_gpu_tools.checkpoints.content import all_state_dicts
from lightning_gpu_tools.checkpoints.faults import Fault
from lightning_gpu_tools.checkpoints.file_kinds import compressed, is_torchs, other_zip
from lightning_gpu_tools.checkpoints.inert_pickle import InertUnpickler
from lightning_gpu_tools.checkpoints.structure import BYTES_OF_DTYPE, Structure
from lightning_gpu_tools.checkpoints.zip_records import read_index, read_records

NAME = "zip"
_CODE = re.compile(r"[^/]+/code/")  # of TorchScript, which compresses it


def recognizes(head: bytes) -> bool:
    """Return whether a file begins like a zip archive."""
    return head.startswith(b"PK\x03\x04")


def describe(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Describe the pickle in the archive, and check it against the records."""
    entries = read_index(file, size_bytes)
    names = [entry.filename for entry in entries]
    if not is_torchs(names):
        raise other_zip(path, names)
    if any(entry.compress_type != ZIP_STORED and not _CODE.match(entry.filename) for entry in entries):
        raise compressed(path, names)
    records = read_records(file, size_bytes, entries)
    if "byteorder" in records and records["byteorder"].read() != sys.byteorder.encode():
        raise Fault("was written on a machine with another byte order", "Convert it there to safetensors.")
    record = records["data.pkl"]
    reader = InertUnpickler(BytesIO(record.read()), record.size_bytes)
    content = reader.load()
    is_script = "constants.pkl" in records
    if is_script and not all_state_dicts(content):
        what = "is a TorchScript program without plain weights, as after torch.jit.freeze or quantization"
        raise Fault(what, "Use the checkpoint that it was exported from.")
    places = {}
    for key, storage in reader.storages.items():
        numbers = records[f"data/{storage.key}"]
        # At most part of an element is left over.
        if not 0 <= numbers.size_bytes - storage.size_bytes < BYTES_OF_DTYPE[storage.dtype]:
            raise ValueError("a record of another length than its storage")
        places[key] = numbers.start
    return Structure(
        file,
        path,
        size_bytes,
        "TorchScript" if is_script else NAME,
        content,
        reader.globals,
        {storage.location for storage in reader.storages.values()},
        records=records,
        places=places,
        filled=reader.filled,
    )
