"""torch's files: a zip archive with a pickle and one record for each storage; before 1.6, pickles, then the numbers."""

from __future__ import annotations

import mmap
import re
import struct
import sys
import zipfile
from io import BytesIO
from typing import BinaryIO

from lightning_gpu_tools.checkpoints.content import all_state_dicts
from lightning_gpu_tools.checkpoints.formats import compressed, is_torchs, other_zip
from lightning_gpu_tools.checkpoints.inert_pickle import InertUnpickler
from lightning_gpu_tools.checkpoints.structure import BYTES_OF_DTYPE, RESTORE, Fault, Record, Structure, damaged
from lightning_gpu_tools.units import format_bytes, printable

_ZIP_START = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30  # before the name of a record; ends with the lengths of the name and of the extra field
_ENCRYPTED = 1 << 0
_CODE = re.compile(r"[^/]+/code/")  # of TorchScript, which compresses it
# torch.serialization.MAGIC_NUMBER, pickled: in protocol 2 to 5, or 0.
_LEGACY_START = re.compile(
    rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.|L119547037146038801333356L\n\.", re.DOTALL
)


def recognizes(head: bytes) -> bool:
    """Return whether a file begins like a zip archive, or with torch's magic number."""
    return head.startswith(_ZIP_START) or _LEGACY_START.match(head) is not None


def describe(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Describe the pickle in a file, and check that all numbers are present."""
    file.seek(0)
    is_zip = file.read(len(_ZIP_START)) == _ZIP_START
    return (_describe_zip if is_zip else _describe_legacy)(file, path, size_bytes)


def _describe_zip(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Describe the pickle in the archive, and check it against the records."""
    if not zipfile.is_zipfile(file):
        fault = f"is cut short: {format_bytes(size_bytes)}, and its index (at the end of the file) is missing"
        raise Fault(f"{fault}. Probably a save or a copy was interrupted", RESTORE)
    entries = zipfile.ZipFile(file).infolist()
    names = [entry.filename for entry in entries]
    if not is_torchs(names):
        raise other_zip(path, names)
    if any(entry.compress_type != zipfile.ZIP_STORED and not _CODE.match(entry.filename) for entry in entries):
        raise compressed(path, names)
    records = _read_records(file, size_bytes, entries)
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
            raise ValueError("a record whose length does not match its storage")
        places[key] = numbers.start
    return Structure(
        file,
        path,
        size_bytes,
        "TorchScript" if is_script else "zip",
        content,
        reader.globals,
        {storage.location for storage in reader.storages.values()},
        records=records,
        places=places,
    )


def _read_records(file: BinaryIO, size_bytes: int, entries: list[zipfile.ZipInfo]) -> dict[str, Record]:
    """Return the records by their names in the folder of the first one, as torch does."""
    root = entries[0].filename.partition("/")[0] + "/"
    records: dict[str, Record] = {}
    names: set[str] = set()
    for entry in entries:
        if entry.filename.lower() in names or entry.flag_bits & _ENCRYPTED:
            raise damaged(f"its record {printable(entry.filename)} is encrypted or duplicated")
        names.add(entry.filename.lower())
        if entry.filename.startswith(root) and entry.compress_type == zipfile.ZIP_STORED and not entry.is_dir():
            name = entry.filename.removeprefix(root)
            file.seek(entry.header_offset)
            header = file.read(_LOCAL_HEADER_BYTES)
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            start = entry.header_offset + _LOCAL_HEADER_BYTES + lengths
            if start + entry.file_size > size_bytes or entry.file_size != entry.compress_size:
                raise damaged(f"its record {printable(name)} is not where its index says")
            records[name] = Record(file, name, start, entry.file_size, entry.CRC)
    return records


def _describe_legacy(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Describe the pickles, and check that all numbers are present."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # The magic number, the version, the machine that wrote it, the contents, and the keys of the storages.
        readers = [InertUnpickler(data, size_bytes) for _ in range(5)]
        *_, content, keys = [reader.load() for reader in readers]
        named = set().union(*(reader.globals for reader in readers))
        storages = readers[3].storages
        if sorted(keys) != sorted(storages):
            raise ValueError("numbers other than those that it describes")
        place = data.tell()
        places = {}
        for key in keys:  # each storage comes after its length in 8 bytes
            storage = storages[key]
            places[key] = place + 8
            if struct.unpack_from("<q", data, place)[0] != storage.numel:
                raise ValueError("a storage whose length does not match")
            place += 8 + storage.size_bytes
    if place > size_bytes:
        raise ValueError("cut short")
    devices = {storage.location for storage in storages.values()}
    return Structure(file, path, size_bytes, "legacy", content, named, devices, places=places)
