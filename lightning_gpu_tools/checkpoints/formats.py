"""What a checkpoint file is, what is wrong with a broken one, and the records of a zip file. Runs nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from lightning_gpu_tools.checkpoints.atomic_file import local_copy
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError, CheckpointNotFoundError
from lightning_gpu_tools.units import format_bytes, printable, printable_path

Format = Literal["zip", "legacy", "safetensors", "dcp", "deepspeed"]  # the last two are folders

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
# torch.serialization.MAGIC_NUMBER, pickled: in protocol 2 to 5, or 0.
_LEGACY_START = re.compile(
    rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.|L119547037146038801333356L\n\.", re.DOTALL
)
_MAX_SAFETENSORS_HEADER = 100_000_000  # as in the format's own library


class Fault(Exception):
    """Why a file is no checkpoint."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what, advice)
        self.what = what  # without the subject: "is empty"
        self.advice = advice


RESTORE = "Restore it from where it came from, or use an earlier checkpoint."


def damaged(what: str) -> Fault:
    """Return the fault of a file that contradicts itself."""
    return Fault(f"is damaged: {what}", RESTORE)


@contextlib.contextmanager
def faults_of(path: object) -> Iterator[None]:
    """Turn a :class:`Fault` into the error that says which file has it."""
    try:
        yield
    except Fault as fault:
        raise BrokenCheckpointError(f"{printable_path(path)} {fault.what}. {fault.advice}".rstrip()) from None


@contextlib.contextmanager
def any_error_is(fault: Fault) -> Iterator[None]:
    """Raise this instead of whatever damaged or hostile contents raise."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (Fault, CheckpointError)) or not comes_from_contents(error):
            raise
        raise fault from None


def comes_from_contents(error: Exception) -> bool:
    """Whether the contents made reading fail, not the disk; they cause EINVAL by impossible offsets."""
    return not isinstance(error, OSError) or error.errno in (None, errno.EINVAL)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file, once for all uses: another may be at its path in the next moment."""
    with local_copy(path) as local:
        try:
            with faults_of(path):
                file = _open(local)
        except FileNotFoundError:
            no_folder = "" if Path(local).parent.is_dir() else " The folder does not exist either."
            raise CheckpointNotFoundError(f"Checkpoint file not found: {printable_path(path)}.{no_folder}") from None
        with file:
            yield file


def identify(file: BinaryIO) -> Format:
    """Return the format of a file, by its beginning."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(1024)
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    with contextlib.suppress(tarfile.HeaderError):  # torch.load, too, asks this before it looks for its own formats
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
        raise Fault("is a tar archive", "Unpack it first.")
    if _LEGACY_START.match(head):
        return "legacy"
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and length <= _MAX_SAFETENSORS_HEADER:
        if length + 8 > size:
            raise Fault(f"is a safetensors file cut short at {format_bytes(size)}, within its header", RESTORE)
        return "safetensors"
    raise _something_else(head, size)


def _open(path: str) -> BinaryIO:
    if os.path.isdir(path):
        inside = sorted(name for name in os.listdir(path) if name.endswith(SUFFIXES))
        if inside:
            raise Fault("is a folder", f"It holds {listed(inside, 5)}; name the file.")
        raise Fault("is a folder without the shards of a checkpoint", "Name a file, or the folder of all shards.")
    # Else opening a pipe waits until somebody writes to it.
    without_waiting = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | without_waiting))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise Fault("is a pipe or a device, not a file")


def _something_else(head: bytes, size: int) -> Fault:
    if size == 0:
        return Fault("is empty", "Most likely the disk was full or a save was interrupted.")
    if not head.strip(b"\0"):
        return Fault("begins with nothing but zeros: the machine stopped before the data was written", RESTORE)
    text = head.lstrip()[:200].lower()
    for starts, what, advice in _OTHER_FILES:
        if head.startswith(starts) or text.startswith(starts):
            return Fault(what, advice)
    advice = "If it was one, restore it from where it came from."
    return Fault(f"is no checkpoint: {format_bytes(size)} that begin with {head[:8]!r}", advice)


_CONVERTED = "Get the checkpoint that it was made from, or convert it with the library that wrote it."
# How a file begins (in any case, after any white space), what it is, what to do.
_OTHER_FILES: tuple[tuple[tuple[bytes, ...], str, str], ...] = (
    ((b"version https://git-lfs",), "is a git-lfs pointer, not the file itself", "Fetch the file with: git lfs pull"),
    (
        (b"<!doctype html", b"<html", b"<?xml", b"<head"),
        "is a web page: the download got a log-in or error page",
        "Download the file itself again.",
    ),
    ((b"{", b"["), "is a JSON text", "Name the file with the weights."),
    (
        (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf", b"Rar!"),
        "is compressed (gzip, bzip2, xz, zstd, 7-Zip or RAR)",
        "Unpack it first.",
    ),
    (
        tuple(b"\x80" + bytes([protocol]) for protocol in range(6)),
        "is a Python pickle that torch.save did not write",
        "Only files by torch.save or safetensors can be loaded.",
    ),
    ((b"\x93NUMPY",), "is a NumPy array (.npy)", "Load it with numpy.load."),
    ((b"GGUF",), "is a GGUF file, as llama.cpp reads them", _CONVERTED),
    ((b"\x89HDF",), "is an HDF5 file, as Keras writes them", _CONVERTED),
    (
        tuple(b"\x08" + bytes([version, tag]) for version in range(3, 16) for tag in (0x12, 0x3A, 0x42)),
        "is an ONNX model",
        _CONVERTED,
    ),
    (
        tuple(bytes([0x80 + entries, 0xA0 + length]) for entries in range(1, 16) for length in range(1, 32)),
        "is a msgpack file, as Flax writes them",
        _CONVERTED,
    ),
)


# APPNOTE.TXT 4.3.7, 4.3.12, 4.3.14, 4.3.15, 4.3.16.
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_MAX_COMMENT_BYTES = 65535
_STORED, _DEFLATED = 0, 8
# Encrypted, patched, strongly encrypted, masked headers: 4.4.4.
_UNREADABLE_FLAGS = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 13
_FOLDER_ATTRIBUTE = 1 << 4  # of MS-DOS: 4.4.15
# After a record that was written as a stream, with or without signature and zip64: 4.3.9.
_DESCRIPTOR_BYTES = frozenset({0, 12, 16, 20, 24})
_MAX_DEFLATE_RATIO = 1032  # https://zlib.net/zlib_tech.html
# Trained weights shrink to a half at best, pruned ones to a tenth.
_MAX_UNPACKED_RATIO = 100
_MIN_UNPACKED_LIMIT_BYTES = 256 << 20
_CHUNK_BYTES = 16 << 20
_CONTRADICTION = "its records and the index at its end do not agree"


class Record(NamedTuple):
    """A record of an open file."""

    file: BinaryIO
    name: str
    start: int  # of its first byte; in the index, of its header
    packed_bytes: int
    size_bytes: int  # unpacked
    crc: int  # of the unpacked bytes; torch writes 0 after set_crc32_options(False)
    is_stored: bool  # as it is, not compressed

    def __str__(self) -> str:
        return printable(self.name)

    def read(self) -> bytes:
        """Return what is in the record."""
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """Yield what is in the record, unpacked; raise at the end if its length or checksum is wrong."""
        crc = total = 0
        for chunk in _packed(self) if self.is_stored else _inflated(self):
            crc = zlib.crc32(chunk, crc)
            total += len(chunk)
            if total > self.size_bytes:
                break
            yield chunk
        if total != self.size_bytes:
            raise damaged(f"the record {self} is not as long as the index says")
        if self.crc not in (crc, 0):
            raise damaged(f"the checksum of the record {self} is wrong")


def read_records(file: BinaryIO, size_bytes: int) -> tuple[str, dict[str, Record]]:
    """Return the folder of all records, ``"name/"`` or ``""``, and the records by their name in it."""
    index, count, index_start = _read_index(file, size_bytes)
    entries = sorted(_entries(file, index), key=lambda entry: entry.start)
    if len(entries) != count:
        raise damaged(_CONTRADICTION)
    root = _only_root(entries)
    records: dict[str, Record] = {}
    names: set[str] = set()
    end = 0
    for entry in entries:
        if entry.start - end not in _DESCRIPTOR_BYTES:
            raise damaged(_CONTRADICTION)
        start = _start(entry)
        end = start + entry.packed_bytes
        if entry.name.lower() in names:
            raise damaged(_CONTRADICTION)
        names.add(entry.name.lower())
        if not entry.name.endswith("/"):  # a folder
            name = entry.name.removeprefix(root)
            records[name] = entry._replace(name=name, start=start)
    if index_start - end not in _DESCRIPTOR_BYTES:
        raise damaged(_CONTRADICTION)
    _refuse_bomb(records.values(), size_bytes)
    return root, records


def _no_index(tail: bytes, size_bytes: int) -> Fault:
    zeros = len(tail) - len(tail.rstrip(b"\0"))
    if zeros < 512:  # a disk sector: less may be the file's own padding
        what = f"is cut short: {format_bytes(size_bytes)}, and its index (at the end of the file) is missing. "
        return Fault(f"{what}Most likely a save or a copy was interrupted", RESTORE)
    what = f"ends in zeros where its index should be ({format_bytes(size_bytes)} in all)"
    return Fault(f"{what}: the machine stopped before the data was written", RESTORE)


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
        signature, _, _, _, disk, index_disk, *large = _END64.unpack_from(tail, end)
        count_here, count, length, start = large
        unset = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        is_one_index = all(number in pair for number, *pair in zip(short, large, unset, strict=True))
        if signature != b"PK\6\6" or _LOCATOR64.unpack_from(tail, locator)[2] != tail_start + end or not is_one_index:
            raise damaged(_CONTRADICTION)
    if disk or index_disk or count_here != count or start + length != tail_start + end:
        raise damaged(_CONTRADICTION)
    file.seek(start)
    return file.read(length), count, start


def _start(entry: Record) -> int:
    """Return where a record's bytes begin by its local header, as torch does."""
    name = entry.name.encode(errors="surrogateescape")
    entry.file.seek(entry.start)
    header = entry.file.read(_LOCAL_HEADER.size + len(name))
    if header[_LOCAL_HEADER.size :] == name:
        signature, _, flags, method, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(header)
        expected = (b"PK\3\4", _STORED if entry.is_stored else _DEFLATED, len(name))
        if (signature, method, name_bytes) == expected and not flags & _UNREADABLE_FLAGS:
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
        entry = Record(file, text, header_start, packed, size, crc, method == _STORED)
        if method not in (_STORED, _DEFLATED) or flags & _UNREADABLE_FLAGS or disk:
            raise damaged(f"the record {entry} is encrypted or compressed in a way that torch cannot read")
        if attributes & _FOLDER_ATTRIBUTE and not name.endswith(b"/"):  # torch silently unpacks nothing then
            raise damaged(_CONTRADICTION)
        if size > packed * _MAX_DEFLATE_RATIO or (method == _STORED and size != packed):
            raise damaged(_CONTRADICTION)
        yield entry


def _zip64(extra: bytes, *numbers: int) -> Iterator[int]:
    """Replace the 32-bit numbers that are all ones by the 8-byte ones of the extra field: 4.5.3."""
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
        raise Fault(f"has its records in more than one folder: {shown}", "Zip the folder of the checkpoint alone.")
    return ""


def _refuse_bomb(records: Iterable[Record], size_bytes: int) -> None:
    unpacked = sum(record.size_bytes for record in records if not record.is_stored)
    if unpacked > max(_MIN_UNPACKED_LIMIT_BYTES, _MAX_UNPACKED_RATIO * size_bytes):
        raise Fault(
            f"is compressed and would unpack to {format_bytes(unpacked)}, {unpacked // size_bytes} times its size",
            "Weights do not shrink that much. If you trust it, zip it without compression: zip -0.",
        )


def _packed(record: Record) -> Iterator[bytes]:
    left = record.packed_bytes
    record.file.seek(record.start)
    while left and (chunk := record.file.read(min(left, _CHUNK_BYTES))):
        left -= len(chunk)
        yield chunk


def _inflated(record: Record) -> Iterator[bytes]:
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    chunks = _packed(record)
    packed = b""
    while not inflate.eof:
        packed = packed or next(chunks, b"")
        try:
            chunk = inflate.decompress(packed, _CHUNK_BYTES)
        except zlib.error as error:
            raise damaged(f"the record {record} cannot be unpacked ({error})") from None
        if not packed and not chunk:
            return
        packed = inflate.unconsumed_tail
        yield chunk
