"""What kind of file a checkpoint is, and what is wrong with one that cannot be read. Needs no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from lightning_gpu_tools.checkpoints.atomic_file import local_copy
from lightning_gpu_tools.checkpoints.key_groups import listed
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError, CheckpointNotFoundError
from lightning_gpu_tools.units import format_bytes, printable_path

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
            raise CheckpointNotFoundError(f"There is no checkpoint at {printable_path(path)}.{no_folder}") from None
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
