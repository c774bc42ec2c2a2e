"""The records of zip files, and their checksums."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from lightning_gpu_tools.checkpoints.faults import RESTORE, Fault, damaged
from lightning_gpu_tools.units import format_bytes, printable

_LOCAL_HEADER_BYTES = 30  # before the name of a record; ends with the lengths of the name and of the extra field
_CHUNK_BYTES = 16 << 20
_ENCRYPTED = 1 << 0


class Record(NamedTuple):
    """A record of an open file, not compressed."""

    file: BinaryIO
    name: str
    start: int  # offset of its first byte
    size_bytes: int
    crc: int  # torch writes 0 after set_crc32_options(False)

    def read(self) -> bytes:
        """Return the bytes of the record."""
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the record in chunks; raise at the end if its checksum is wrong."""
        crc, left = 0, self.size_bytes
        self.file.seek(self.start)
        while left and (chunk := self.file.read(min(left, _CHUNK_BYTES))):
            crc = zlib.crc32(chunk, crc)
            left -= len(chunk)
            yield chunk
        if left or self.crc not in (crc, 0):
            raise damaged(f"the checksum of the record {printable(self.name)} is wrong")


def read_index(file: BinaryIO, size_bytes: int) -> list[zipfile.ZipInfo]:
    """Return the entries of all records from the end of a zip file."""
    if not zipfile.is_zipfile(file):
        fault = f"is cut short: {format_bytes(size_bytes)}, and its index (at the end of the file) is missing"
        raise Fault(f"{fault}. Probably a save or a copy was interrupted", RESTORE)
    return zipfile.ZipFile(file).infolist()


def read_records(file: BinaryIO, size_bytes: int, entries: list[zipfile.ZipInfo]) -> dict[str, Record]:
    """Return the records by their names in the folder of the first one, as torch does."""
    root = entries[0].filename.partition("/")[0] + "/"
    records: dict[str, Record] = {}
    names: set[str] = set()
    for entry in entries:
        if entry.filename.lower() in names or entry.flag_bits & _ENCRYPTED:
            raise damaged(f"its record {printable(entry.filename)} is encrypted, or there twice")
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
