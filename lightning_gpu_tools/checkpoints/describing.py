"""Reading the contents of a checkpoint file without its weights, without torch, and without running its code."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import BinaryIO

from lightning_gpu_tools.checkpoints.faults import RESTORE, Fault, any_error_is, damaged, faults_of
from lightning_gpu_tools.checkpoints.formats import FileFormat, safetensors, torch_legacy, torch_zip
from lightning_gpu_tools.checkpoints.structure import Structure, collector_paused
from lightning_gpu_tools.units import format_bytes

_FORMATS: tuple[FileFormat, ...] = (torch_zip, torch_legacy, safetensors)


def describe(file: BinaryIO, path: str) -> Structure:
    """Read the description in an open file, and check it against the file's contents."""
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(1024)
    with faults_of(path):
        for form in _FORMATS:
            if form.recognizes(head):
                with collector_paused(), any_error_is(damaged("its description and its contents do not match")):
                    return replace(form.describe(file, path, size_bytes), form=form)
        raise _something_else(head, size_bytes)


def _something_else(head: bytes, size: int) -> Fault:
    if size == 0:
        return Fault("is empty", "Probably the disk was full, or a save was interrupted.")
    text = head.lstrip()[:200].lower()
    for starts, what, advice in _OTHER_FILES:
        if head.startswith(starts) or text.startswith(starts):
            return Fault(what, advice)
    return Fault(f"is not a checkpoint: {format_bytes(size)} that begin with {head[:8]!r}", RESTORE)


# First bytes of a file (in any case, after any whitespace), what the file is, and what to do.
_OTHER_FILES: tuple[tuple[tuple[bytes, ...], str, str], ...] = (
    ((b"version https://git-lfs",), "is a git-lfs pointer, not the file itself", "To fetch the file: git lfs pull"),
    (
        (b"<!doctype html", b"<html", b"<?xml", b"<head"),
        "is a web page: the download returned a login or error page",
        "Download the file itself.",
    ),
    ((b"{", b"["), "is a JSON file", "Use the file with the weights."),
    (
        (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"),
        "is compressed (gzip, bzip2, xz or zstd)",
        "Unpack it first.",
    ),
    (
        tuple(b"\x80" + bytes([protocol]) for protocol in range(6)),
        "is a Python pickle that torch.save did not write",
        "Save it with torch.save or as safetensors.",
    ),
)
