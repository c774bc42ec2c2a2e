"""What a checkpoint file is, and what is wrong with one that cannot be read. Runs nothing and needs no torch."""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointNotFoundError
from lightning_gpu_tools.units import format_bytes, printable, printable_path

Format = Literal["zip", "legacy", "safetensors"]

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
_END_OF_ZIP = b"PK\x05\x06"
# End record plus the longest comment it may have: APPNOTE.TXT 4.3.16.
_LONGEST_ZIP_TAIL = 22 + 65535
# torch.serialization.MAGIC_NUMBER, as the first pickle of a file from before torch 1.6 is it: in protocol 2 to 5, or 0.
_LEGACY_START = re.compile(
    rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.|L119547037146038801333356L\n\.", re.DOTALL
)
# A safetensors header of more than 100 MB is refused by the format's own library.
_LONGEST_SAFETENSORS_HEADER = 100_000_000


@dataclass(frozen=True)
class Fault:
    """Why a file is no checkpoint: ``what`` it is and ``advice``, both without the path."""

    what: str
    advice: str = ""


class DamagedContentsError(Exception):
    """A file contradicts itself; the first argument is the :class:`Fault`. Becomes a ``BrokenCheckpointError``."""


def open_file(path: str) -> BinaryIO:
    """Open a file, once for all that is to be done with it: another may be at its path in the next moment.

    Raises:
        CheckpointNotFoundError: There is nothing at ``path``.
        BrokenCheckpointError: It is a folder, a pipe or a device.
        OSError: It cannot be opened.
    """
    opened = _open(path)
    if isinstance(opened, Fault):
        raise broken(path, opened)
    return opened


def identify(file: BinaryIO) -> Format:
    """Return the format of a file that looks complete.

    Raises:
        DamagedContentsError: It is something else, or not whole; the fault says what and what to do.
        OSError: The file cannot be read.
    """
    found = _look(file)
    if isinstance(found, Fault):
        raise DamagedContentsError(found)
    return found


def broken(path: str, fault: Fault) -> BrokenCheckpointError:
    """Return the error for a fault: what it is, what to do, and another complete checkpoint if there is one."""
    sentences = [f"{printable_path(path)} {fault.what}."]
    if fault.advice:
        sentences.append(fault.advice)
    other = newest_complete_beside(path)
    if other is not None:
        sentences.append(f"A complete checkpoint in the same folder: {printable_path(other)}")
    return BrokenCheckpointError(" ".join(sentences))


def newest_complete_beside(path: str) -> str | None:
    """Return the newest other file in the folder of ``path`` that looks like a complete checkpoint."""
    folder = Path(path).parent
    try:
        others = [entry for entry in folder.iterdir() if entry.suffix in SUFFIXES and entry.name != Path(path).name]
        newest_first = sorted(others, key=lambda entry: entry.stat().st_mtime, reverse=True)
        return next((str(other) for other in newest_first if _looks_complete(str(other))), None)
    except OSError:  # listing neighbours is a courtesy; the error about the file itself must come out
        return None


def comes_from_contents(error: Exception) -> bool:
    """Whether reading failed because of what is in the file, and not because the disk failed."""
    # EINVAL: the contents sent the reader to a place that no file has.
    return not isinstance(error, OSError) or error.errno in (None, errno.EINVAL)


RESTORE = "Restore it from where it came from, or use an earlier checkpoint."


def _open(path: str) -> BinaryIO | Fault:
    try:
        if os.path.isdir(path):
            return _directory(path)
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    except FileNotFoundError:
        raise CheckpointNotFoundError(_not_found(path)) from None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    return Fault("is a pipe or a device, not a file")


def _without_waiting(path: str, flags: int) -> int:
    # Opening a pipe that nobody writes to would wait for ever.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _looks_complete(path: str) -> bool:
    file = _open(path)
    if isinstance(file, Fault):
        return False
    with file:
        return not isinstance(_look(file), Fault)


def _look(file: BinaryIO) -> Format | Fault:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(1024)
    file.seek(max(0, size - _LONGEST_ZIP_TAIL))
    tail = file.read(_LONGEST_ZIP_TAIL)
    if head.startswith(b"PK\x03\x04"):
        return "zip" if _ends_as_zip(tail, size) else _cut_zip(size, tail)
    if _is_tar(head):
        return Fault("is a tar archive", "Unpack it first.")
    if _LEGACY_START.match(head):
        return "legacy"
    if _starts_as_safetensors(head):
        length = struct.unpack("<Q", head[:8])[0]
        if length + 8 > size:
            return Fault(f"is a safetensors file cut short at {format_bytes(size)}, within its header", RESTORE)
        return "safetensors"
    return _something_else(head, size)


def _is_tar(head: bytes) -> bool:
    """Whether ``torch.load``, which asks this first, takes a file for a tar archive; one may begin as anything else."""
    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _not_found(path: str) -> str:
    message = f"There is no checkpoint at {printable_path(path)}."
    other = newest_complete_beside(path)
    if other is not None:
        return f"{message} The newest one in that folder: {printable_path(other)}"
    return message if Path(path).parent.is_dir() else f"{message} The folder does not exist either."


def _ends_as_zip(tail: bytes, size: int) -> bool:
    position = tail.rfind(_END_OF_ZIP)
    if position < 0 or len(tail) - position < 22:
        return False
    directory_size, directory_start = struct.unpack("<II", tail[position + 12 : position + 20])
    # 0xFFFFFFFF: the real numbers are in the zip64 record before this one.
    return bool(directory_start == 0xFFFFFFFF or directory_start + directory_size <= size)


def _cut_zip(size: int, tail: bytes) -> Fault:
    zeros = len(tail) - len(tail.rstrip(b"\0"))
    if zeros >= 512:  # a disk sector: less may be the file's own padding
        least = "at least " if zeros == len(tail) else ""
        return Fault(
            f"ends in {least}{format_bytes(zeros)} of zeros where its index should be ({format_bytes(size)} in all): "
            "the machine or the disk stopped before the data was written",
            RESTORE,
        )
    return Fault(
        f"is cut short: {format_bytes(size)}, and its index (at the end of the file) is missing. Most likely a save or "
        "a copy was interrupted",
        RESTORE,
    )


def _starts_as_safetensors(head: bytes) -> bool:
    if len(head) < 9 or head[8:9] != b"{":
        return False
    return int(struct.unpack("<Q", head[:8])[0]) <= _LONGEST_SAFETENSORS_HEADER


def _something_else(head: bytes, size: int) -> Fault:
    start = head.lstrip()[:200].lower()
    if size == 0:
        return Fault("is empty", "Most likely the disk was full or a save was interrupted.")
    if not head.strip(b"\0"):
        return Fault(
            "holds nothing but zeros at its beginning: the machine or the disk stopped before the data was written",
            RESTORE,
        )
    if start.startswith(b"version https://git-lfs"):
        return Fault("is a git-lfs pointer, not the file itself", "Fetch the file with: git lfs pull")
    if start.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        return Fault(
            "is a web page, not a checkpoint: the download got a log-in or error page",
            "Download the file itself again.",
        )
    if start.startswith((b"{", b"[")):
        return Fault("is a JSON text, not a checkpoint")
    for magic, name in _ARCHIVES.items():
        if head.startswith(magic):
            return Fault(f"is a {name} file", "Unpack it first.")
    if head.startswith(b"\x80") and head[1:2] in b"\x00\x01\x02\x03\x04\x05":
        return Fault(
            "is a Python pickle that torch.save did not write", "Only files by torch.save or safetensors can be loaded."
        )
    if head.startswith(b"\x89HDF"):
        return Fault("is an HDF5 file, as Keras writes them, not a torch checkpoint")
    return Fault(f"is no checkpoint: {format_bytes(size)} that begin with {head[:8]!r}", RESTORE)


_ARCHIVES = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"7z\xbc\xaf": "7-Zip",
    b"Rar!": "RAR",
    b"\x28\xb5\x2f\xfd": "zstd",
}


def _directory(path: str) -> Fault:
    names = set(os.listdir(path))
    if ".metadata" in names:
        return Fault(
            "is a sharded checkpoint (a folder, as FSDP and ModelParallel strategies write it)",
            "Make one file of it with: python -m lightning.pytorch.utilities.consolidate_checkpoint "
            f"{printable_path(path)}   or load it with the strategy that saved it.",
        )
    if "zero_to_fp32.py" in names or ("latest" in names and "checkpoint" in names) or "latest" in names:
        return Fault(
            "is a DeepSpeed checkpoint (a folder of shards)",
            "Make one file of it with lightning.pytorch.utilities.deepspeed."
            "convert_zero_checkpoint_to_fp32_state_dict(folder, file), or with the zero_to_fp32.py inside it.",
        )
    inside = sorted(printable(name) for name in names if name.endswith(SUFFIXES))
    if inside:
        return Fault(
            "is a folder",
            f"It holds {', '.join(inside[:5])}{', …' if len(inside) > 5 else ''}; name the file.",
        )
    return Fault("is a folder, and no sharded checkpoint either (it has no .metadata and no latest file)")
