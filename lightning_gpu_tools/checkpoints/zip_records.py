"""The records of a zip file, accepted only if every reader would read the same. Runs no code."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from lightning_gpu_tools.checkpoints.faults import RESTORE, Fault, damaged
from lightning_gpu_tools.units import format_bytes, printable

# APPNOTE.TXT 4.3.7, 4.3.12, 4.3.14, 4.3.15, 4.3.16.
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_MAX_COMMENT_BYTES = 65535
_STORED = 0
# Encrypted, patched, strongly encrypted, masked headers: 4.4.4.
_UNREADABLE_FLAGS = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 13
_FOLDER_ATTRIBUTE = 1 << 4  # of MS-DOS: 4.4.15
# After a record that was written as a stream, with or without signature and zip64: 4.3.9.
_DESCRIPTOR_BYTES = frozenset({0, 12, 16, 20, 24})
_CHUNK_BYTES = 16 << 20
_CONTRADICTION = "its records and the index at its end do not match"


class Record(NamedTuple):
    """A record of an open file."""

    file: BinaryIO
    name: str
    start: int  # offset of its first byte; in the index, of its header
    size_bytes: int
    crc: int  # torch writes 0 after set_crc32_options(False)
    packed_bytes: int  # in the file
    method: int | None  # of compression; None if only a password opens it

    def __str__(self) -> str:
        return printable(self.name)

    @property
    def is_compressed(self) -> bool:
        """Whether its bytes must be unpacked."""
        return self.method not in (_STORED, None)

    def read(self) -> bytes:
        """Return the bytes of the record."""
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the record in chunks; raise at the end if its checksum is wrong."""
        crc, left = 0, self.size_bytes
        try:
            for chunk in self._inflated_chunks() if self.is_compressed else self._packed_chunks():
                crc = zlib.crc32(chunk, crc)
                left -= len(chunk)
                yield chunk
        except zlib.error:
            left = -1
        if left or self.crc not in (crc, 0):
            raise damaged(f"the checksum of the record {self} is wrong")

    def _packed_chunks(self) -> Iterator[bytes]:
        left = self.packed_bytes
        self.file.seek(self.start)
        while left and (chunk := self.file.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk

    def _inflated_chunks(self) -> Iterator[bytes]:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        for packed in self._packed_chunks():
            rest = packed
            while rest:
                yield inflater.decompress(rest, _CHUNK_BYTES)
                rest = inflater.unconsumed_tail


class Index(NamedTuple):
    """The index at the end of a zip file."""

    entries: list[Record]  # ``start`` is the offset of their headers
    length: int  # number of entries, according to the file
    start: int  # its offset in the file


def read_records(index: Index) -> tuple[str, dict[str, Record]]:
    """Return the folder of all records, ``"name/"`` or ``""``, and the records by name in the folder."""
    entries = sorted(index.entries, key=lambda entry: entry.start)
    if len(entries) != index.length:
        raise damaged(_CONTRADICTION)
    root = _only_root(entries)
    records: dict[str, Record] = {}
    names: set[str] = set()
    end = 0
    for entry in entries:
        if entry.method is None:
            raise Fault(f"has an encrypted record, {entry}", "Unpack it with its password, and zip it without one.")
        if entry.start - end not in _DESCRIPTOR_BYTES:
            raise damaged(_CONTRADICTION)
        start = _start(entry)
        end = start + entry.packed_bytes
        if entry.name.lower() in names:
            raise damaged(_CONTRADICTION)
        names.add(entry.name.lower())
        if not entry.name.endswith("/"):  # not a folder
            name = entry.name.removeprefix(root)
            records[name] = entry._replace(name=name, start=start)
    if index.start - end not in _DESCRIPTOR_BYTES:
        raise damaged(_CONTRADICTION)
    return root, records


def read_index(file: BinaryIO, size_bytes: int) -> Index:
    """Read the names of all records, and where they are, from the end of a zip file."""
    tail_start = max(0, size_bytes - _END.size - _MAX_COMMENT_BYTES - _LOCATOR64.size - _END64.size)
    file.seek(tail_start)
    tail = file.read(size_bytes - tail_start)
    end = tail.rfind(b"PK\5\6")  # the last one, as in torch's reader
    if not 0 <= end <= len(tail) - _END.size:
        fault = f"is cut short: {format_bytes(size_bytes)}, and its index (at the end of the file) is missing"
        raise Fault(f"{fault}. Probably a save or a copy was interrupted", RESTORE)
    _, disk, index_disk, count_here, count, length, start, _ = _END.unpack_from(tail, end)
    locator = end - _LOCATOR64.size
    if locator >= _END64.size and tail[locator : locator + 4] == b"PK\6\7":
        short = (count_here, count, length, start)
        end = locator - _END64.size
        signature, _, _, _, disk, index_disk, *large = _END64.unpack_from(tail, end)
        count_here, count, length, start = large
        unset = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        is_one_index = all(number in pair for number, *pair in zip(short, large, unset, strict=True))
        if signature != b"PK\6\6" or _LOCATOR64.unpack_from(tail, locator)[2] != tail_start + end or not is_one_index:
            raise damaged(_CONTRADICTION)
    if disk or index_disk or count_here != count or start + length != tail_start + end:
        raise damaged(_CONTRADICTION)
    file.seek(start)
    return Index([*_entries(file, file.read(length))], count, start)


def _start(entry: Record) -> int:
    """Return the offset of a record's bytes according to its local header, as torch does."""
    name = entry.name.encode(errors="surrogateescape")
    entry.file.seek(entry.start)
    header = entry.file.read(_LOCAL_HEADER.size + len(name))
    if header[_LOCAL_HEADER.size :] == name:
        signature, _, flags, method, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(header)
        if (signature, method, name_bytes) == (b"PK\3\4", entry.method, len(name)) and not flags & _UNREADABLE_FLAGS:
            return entry.start + len(header) + int(extra_bytes)
    raise damaged(_CONTRADICTION)


def _entries(file: BinaryIO, index: bytes) -> Iterator[Record]:
    place = 0
    while place < len(index):
        if len(index) - place < _ENTRY.size:
            raise damaged(_CONTRADICTION)
        (signature, _, _, flags, method, _, _, crc, packed, size, name_length, extra_length, comment_length, disk, _,
         attributes, header_start) = _ENTRY.unpack_from(index, place)  # fmt: skip
        extra_start = place + _ENTRY.size + name_length
        name = index[place + _ENTRY.size : extra_start]
        place = extra_start + extra_length + comment_length
        if signature != b"PK\1\2" or place > len(index) or b"\0" in name:
            raise damaged(_CONTRADICTION)
        if 0xFFFFFFFF in (size, packed, header_start):
            extra = index[extra_start : extra_start + extra_length]
            size, packed, header_start = _zip64(extra, size, packed, header_start)
        text = name.decode(errors="surrogateescape")
        # If a record is marked as a folder, torch silently reads nothing from it.
        if disk or (attributes & _FOLDER_ATTRIBUTE and not name.endswith(b"/")):
            raise damaged(_CONTRADICTION)
        if method == _STORED and size != packed:
            raise damaged(_CONTRADICTION)
        yield Record(file, text, header_start, size, crc, packed, None if flags & _UNREADABLE_FLAGS else method)


def _zip64(extra: bytes, *numbers: int) -> Iterator[int]:
    """Replace 32-bit numbers whose bits are all ones with the 8-byte numbers of the extra field: 4.5.3."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            large = iter(struct.unpack_from(f"<{min(length, len(extra) - 4) // 8}Q", extra, 4))
            for number in numbers:
                yield next(large, number) if number == 0xFFFFFFFF else number
            return
        extra = extra[4 + length :]
    yield from numbers


def _only_root(entries: list[Record]) -> str:
    roots = {entry.name[: entry.name.find("/") + 1] for entry in entries}
    if len(roots) == 1:
        return roots.pop()
    if any(entry.name.endswith("/data.pkl") for entry in entries):
        shown = " and ".join(printable(root or "none") for root in sorted(roots)[:3])
        raise Fault(f"has records in more than one folder: {shown}", "Zip only the folder of the checkpoint.")
    return ""
