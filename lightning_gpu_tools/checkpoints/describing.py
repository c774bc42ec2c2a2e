"""What is inside a checkpoint file, read without its weights, without torch and without running any of it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, BinaryIO, Protocol

from lightning_gpu_tools.checkpoints.faults import RESTORE, Fault, any_error_is, faults_of
from lightning_gpu_tools.checkpoints.formats import safetensors, torch_legacy, torch_zip
from lightning_gpu_tools.checkpoints.structure import Structure, collector_paused
from lightning_gpu_tools.units import format_bytes


class FileFormat(Protocol):
    """What a module of ``formats`` has for a format of one file."""

    DAMAGE: str  # what is wrong with a file if describing it raises anything but a fault

    def recognizes(self, head: bytes) -> bool:
        """Whether a file that begins so is of this format."""

    def describe(self, file: BinaryIO, path: str, size_bytes: int) -> Structure:
        """Read the description of an open file and check it against what the file holds."""

    def load(self, structure: Structure, map_location: Any, weights_only: bool) -> Any:
        """Load what was described; its numbers are mapped where they can be."""


_FORMATS: tuple[FileFormat, ...] = (torch_zip, torch_legacy, safetensors)


def describe(file: BinaryIO, path: str) -> Structure:
    """Read the description of an open file and check it against what the file holds."""
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(1024)
    with faults_of(path):
        for form in _FORMATS:
            if form.recognizes(head):
                with collector_paused(), any_error_is(Fault(form.DAMAGE, RESTORE)):
                    return replace(form.describe(file, path, size_bytes), form=form)
        raise _something_else(head, size_bytes)


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
