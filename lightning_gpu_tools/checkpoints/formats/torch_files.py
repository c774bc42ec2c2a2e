"""torch's files: a zip archive with a pickle and one record for each storage; before 1.6, pickles, then the numbers."""

import mmap
import re
import struct
import sys
import zipfile
from io import BytesIO
from typing import BinaryIO

from lightning_gpu_tools.checkpoints.formats.other_programs import compressed, other_zip
from lightning_gpu_tools.checkpoints.inert_pickle import InertUnpickler
from lightning_gpu_tools.checkpoints.structure import BYTES_OF_DTYPE, RESTORE, Fault, Record, Structure, damaged
from lightning_gpu_tools.units import format_bytes, printable

_ZIP_START = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30  # before the name of a record; ends with the lengths of the name and of the extra field
_ENCRYPTED = 1 << 0
# torch.serialization.MAGIC_NUMBER, pickled in protocol 2 to 5.
_LEGACY_START = re.compile(rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)


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
    records = _read_records(file, path, size_bytes)
    if "byteorder" in records and records["byteorder"].read() != sys.byteorder.encode():
        raise Fault("was written on a machine with another byte order", "Convert it there to safetensors.")
    record = records["data.pkl"]
    reader = InertUnpickler(BytesIO(record.read()), record.size_bytes)
    content = reader.load()
    places = {}
    for key, storage in reader.storages.items():
        numbers = records[f"data/{storage.key}"]
        # At most part of an element is left over.
        if not 0 <= numbers.size_bytes - storage.size_bytes < BYTES_OF_DTYPE[storage.dtype]:
            raise ValueError("a record whose length does not match its storage")
        places[key] = numbers.start
    devices = {storage.location for storage in reader.storages.values()}
    return Structure(file, path, size_bytes, "zip", content, reader.globals, devices, records=records, places=places)


def _read_records(file: BinaryIO, path: str, size_bytes: int) -> dict[str, Record]:
    """Return the records of torch's zip archive by their names in the folder of the first one, as torch does.

    Refuses other archives, and those that readers of zip files may understand in different ways.
    """
    if not zipfile.is_zipfile(file):
        fault = f"is cut short: {format_bytes(size_bytes)}, and its index (at the end of the file) is missing"
        raise Fault(f"{fault}. Probably a save or a copy was interrupted", RESTORE)
    entries = zipfile.ZipFile(file).infolist()
    names = [entry.filename for entry in entries]
    in_folders = {name.partition("/")[2] for name in names}
    if "data.pkl" not in in_folders or "constants.pkl" in in_folders:
        raise other_zip(names)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise compressed(path, names)
    root = names[0].partition("/")[0] + "/"
    records: dict[str, Record] = {}
    if len({name.lower() for name in names}) < len(names) or any(entry.flag_bits & _ENCRYPTED for entry in entries):
        raise damaged("a record is encrypted or duplicated")
    for entry in entries:
        if entry.filename.startswith(root) and not entry.is_dir():
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
