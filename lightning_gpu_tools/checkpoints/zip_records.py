"""The records of a zip file, from an index that can be read in one way only.

Readers of zip files disagree: about two records of one name, bytes before or between the records, a local header that
contradicts the index. torch looks names up without regard to case, in the folder of whichever record comes first.
What two readers could read differently is refused here, so that what is checked is what torch loads.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

from lightning_gpu_tools.checkpoints.formats import RESTORE, Fault, damaged
from lightning_gpu_tools.units import format_bytes, printable

# APPNOTE.TXT 4.3.7, 4.3.12, 4.3.14, 4.3.15, 4.3.16.
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_MAX_COMMENT_BYTES = 65535
_STORED, _DEFLATED = 0, 8
# Encrypted, patched, strongly encrypted, masked headers: APPNOTE.TXT 4.4.4.
_UNREADABLE_FLAGS = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 13
_FOLDER_ATTRIBUTE = 1 << 4  # of MS-DOS: 4.4.15
# Checksum and sizes of a record that was written as a stream come after it: 4.3.9. With or without signature and zip64.
_DESCRIPTOR_BYTES = frozenset({0, 12, 16, 20, 24})
# What deflate can make of a byte at most: https://zlib.net/zlib_tech.html.
_MAX_DEFLATE_RATIO = 1032
# Trained weights shrink to a half at best, pruned ones to a tenth; toys of zeros are small.
_MAX_UNPACKED_RATIO = 100
_MIN_UNPACKED_LIMIT_BYTES = 256 << 20
_CHUNK_BYTES = 16 << 20
_UNREADABLE = "the index at its end cannot be read"


class Record(NamedTuple):
    """Where a record is in the file.

    Attributes:
        name: Its name without the folder that all records are in.
        start: Offset of its first byte.
        packed_bytes: Bytes that it takes in the file.
        size_bytes: Bytes that it unpacks to.
        crc: CRC-32 of what it unpacks to; torch writes 0 after ``set_crc32_options(False)``.
        is_stored: Whether it is in the file as it is, not compressed.
    """

    name: str
    start: int
    packed_bytes: int
    size_bytes: int
    crc: int
    is_stored: bool


def read_records(file: BinaryIO, size_bytes: int) -> tuple[str, dict[str, Record]]:
    """Return the folder that all records are in, with its slash, and the records by their name within it.

    Records that are not all in one folder have their whole names, and the folder is ``""``.
    """
    index, count, index_start = _read_index(file, size_bytes)
    entries = sorted(_entries(index), key=lambda entry: entry.header_start)
    if len(entries) != count:
        raise damaged(_UNREADABLE)
    root = _only_root(entries)
    records: dict[str, Record] = {}
    names: set[bytes] = set()
    end = 0
    for entry in entries:
        if entry.header_start - end not in _DESCRIPTOR_BYTES:
            raise damaged(f"{entry} does not begin where the record before it ends")
        start = _start(file, entry)
        end = start + entry.packed_bytes
        if entry.name.lower() in names:
            raise damaged(f"it has two records called {entry}")
        names.add(entry.name.lower())
        if not entry.name.endswith(b"/"):  # a folder
            name = _text(entry.name[len(root) :])
            is_stored = entry.method == _STORED
            records[name] = Record(name, start, entry.packed_bytes, entry.size_bytes, entry.crc, is_stored)
    if index_start - end not in _DESCRIPTOR_BYTES:
        raise damaged("its records do not end where its index begins")
    _refuse_bomb(records.values(), size_bytes)
    return _text(root), records


def read_chunks(file: BinaryIO, record: Record) -> Iterator[bytes]:
    """Yield what is in a record, as a load gets it, at most 16 MiB at a time."""
    crc = total = 0
    for chunk in _packed(file, record) if record.is_stored else _inflated(file, record):
        crc = zlib.crc32(chunk, crc)
        total += len(chunk)
        if total > record.size_bytes:
            break
        yield chunk
    if total != record.size_bytes:
        raise damaged(f"the record {printable(record.name)} is not as long as the index says")
    if record.crc not in (crc, 0):
        raise damaged(f"the checksum of the record {printable(record.name)} is wrong")


class _Entry(NamedTuple):
    """A record as the index lists it."""

    name: bytes
    method: int
    crc: int
    packed_bytes: int
    size_bytes: int
    header_start: int

    def __str__(self) -> str:
        return printable(_text(self.name))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _no_index(tail: bytes, size_bytes: int) -> Fault:
    zeros = len(tail) - len(tail.rstrip(b"\0"))
    if zeros < 512:  # a disk sector: less may be the file's own padding
        return Fault(
            f"is cut short: {format_bytes(size_bytes)}, and its index (at the end of the file) is missing. Most likely "
            "a save or a copy was interrupted",
            RESTORE,
        )
    least = "at least " if zeros == len(tail) else ""
    return Fault(
        f"ends in {least}{format_bytes(zeros)} of zeros where its index should be ({format_bytes(size_bytes)} in all): "
        "the machine or the disk stopped before the data was written",
        RESTORE,
    )


def _read_index(file: BinaryIO, size_bytes: int) -> tuple[bytes, int, int]:
    """Return the central directory, the number of its entries and its place in the file."""
    tail_start = max(0, size_bytes - _END.size - _MAX_COMMENT_BYTES - _LOCATOR64.size - _END64.size)
    file.seek(tail_start)
    tail = file.read(size_bytes - tail_start)
    end = tail.rfind(b"PK\5\6")  # the last one, as in torch's reader
    if not 0 <= end <= len(tail) - _END.size:
        raise _no_index(tail, size_bytes)
    _, disk, index_disk, count_here, count, length, start, _ = _END.unpack_from(tail, end)
    locator = end - _LOCATOR64.size
    if locator >= _END64.size and tail[locator : locator + 4] == b"PK\6\7":
        short = (count_here, count, length, start)
        end = locator - _END64.size
        signature, _, _, _, disk, index_disk, count_here, count, length, start = _END64.unpack_from(tail, end)
        # Each 32-bit number is either the same or all ones.
        ones = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        pairs = zip(short, (count_here, count, length, start), ones, strict=True)
        is_one_index = all(small in (large, unset) for small, large, unset in pairs)
        if signature != b"PK\6\6" or _LOCATOR64.unpack_from(tail, locator)[2] != tail_start + end or not is_one_index:
            raise damaged(_UNREADABLE)
    if disk or index_disk or count_here != count or start + length != tail_start + end:
        raise damaged(_UNREADABLE)
    file.seek(start)
    return file.read(length), count, start


def _start(file: BinaryIO, entry: _Entry) -> int:
    """Return where a record's bytes begin: torch goes by its local header, which must not contradict the index."""
    file.seek(entry.header_start)
    header = file.read(_LOCAL_HEADER.size + len(entry.name))
    if len(header) == _LOCAL_HEADER.size + len(entry.name):
        signature, _, flags, method, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(header)
        agree = (signature, method, name_bytes) == (b"PK\3\4", entry.method, len(entry.name))
        if agree and header[_LOCAL_HEADER.size :] == entry.name and not flags & _UNREADABLE_FLAGS:
            return entry.header_start + len(header) + int(extra_bytes)
    raise damaged(f"its index and the header of {entry} contradict each other")


def _entries(index: bytes) -> Iterator[_Entry]:
    place = 0
    while place < len(index):
        if len(index) - place < _ENTRY.size:
            raise damaged(_UNREADABLE)
        (signature, _, _, flags, method, _, _, crc, packed, size, name_length, extra_length, comment_length, disk, _,
         attributes, header_start) = _ENTRY.unpack_from(index, place)  # fmt: skip
        extra_start = place + _ENTRY.size + name_length
        name = index[place + _ENTRY.size : extra_start]
        place = extra_start + extra_length + comment_length
        if signature != b"PK\1\2" or place > len(index) or b"\0" in name:
            raise damaged(_UNREADABLE)
        if 0xFFFFFFFF in (size, packed, header_start):
            size, packed, header_start = _zip64(
                index[extra_start : extra_start + extra_length], size, packed, header_start
            )
        entry = _Entry(name, method, crc, packed, size, header_start)
        if method not in (_STORED, _DEFLATED) or flags & _UNREADABLE_FLAGS or disk:
            raise damaged(f"the record {entry} is encrypted or compressed in a way that torch cannot read")
        if attributes & _FOLDER_ATTRIBUTE and not name.endswith(b"/"):  # torch unpacks nothing then, without a word
            raise damaged(f"its index calls the record {entry} a folder")
        if size > packed * _MAX_DEFLATE_RATIO or (method == _STORED and size != packed):
            raise damaged(f"its index contradicts itself about the size of {entry}")
        yield entry


def _zip64(extra: bytes, *numbers: int) -> Iterator[int]:
    """Put the 8-byte numbers of the extra field in the place of 32-bit ones that are all ones: APPNOTE.TXT 4.5.3."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            large = iter(struct.unpack_from(f"<{min(length, len(extra) - 4) // 8}Q", extra, 4))
            for number in numbers:
                yield next(large, number) if number == 0xFFFFFFFF else number
            return
        extra = extra[4 + length :]
    yield from numbers


def _only_root(entries: list[_Entry]) -> bytes:
    roots = {entry.name[: entry.name.find(b"/") + 1] for entry in entries}
    if len(roots) == 1:
        return roots.pop()
    if any(entry.name.endswith(b"/data.pkl") for entry in entries):
        shown = " and ".join(printable(_text(root) or "none") for root in sorted(roots)[:3])
        advice = "Zip the folder of the checkpoint alone."
        raise Fault(f"has its records in more than one folder: {shown}", advice)
    return b""


def _refuse_bomb(records: Iterable[Record], size_bytes: int) -> None:
    unpacked = sum(record.size_bytes for record in records if not record.is_stored)
    if unpacked > max(_MIN_UNPACKED_LIMIT_BYTES, _MAX_UNPACKED_RATIO * size_bytes):
        raise Fault(
            f"is compressed and would unpack to {format_bytes(unpacked)}, {unpacked // size_bytes} times its size",
            "Weights do not shrink that much. If you trust it, unpack it and zip it without compression: zip -0.",
        )


def _packed(file: BinaryIO, record: Record) -> Iterator[bytes]:
    left = record.packed_bytes
    file.seek(record.start)
    while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
        left -= len(chunk)
        yield chunk


def _inflated(file: BinaryIO, record: Record) -> Iterator[bytes]:
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    chunks = _packed(file, record)
    packed = b""
    while not inflate.eof:
        packed = packed or next(chunks, b"")
        try:
            chunk = inflate.decompress(packed, _CHUNK_BYTES)
        except zlib.error as error:
            raise damaged(f"the record {printable(record.name)} cannot be unpacked ({error})") from None
        if not packed and not chunk:
            return
        packed = inflate.unconsumed_tail
        yield chunk
