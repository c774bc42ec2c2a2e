"""Functions that open and describe a checkpoint file, or one file of a folder, without torch and without its code."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.faults import RESTORE, Fault, any_error_is, damaged, faults_of
from lightning_gpu_tools.checkpoints.formats import file_formats
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.checkpoints.structure import Structure
from lightning_gpu_tools.collector import collector_paused
from lightning_gpu_tools.errors import CheckpointNotFoundError
from lightning_gpu_tools.files import local_copy
from lightning_gpu_tools.units import format_bytes, printable, printable_path

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
)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file once for all uses, because another file may be at its path a moment later."""
    with local_copy(path) as local:
        try:
            with faults_of(path):
                file = _open(local)
        except FileNotFoundError:
            no_folder = "" if Path(local).parent.is_dir() else " Its folder does not exist either."
            raise CheckpointNotFoundError(f"Checkpoint file not found: {printable_path(path)}.{no_folder}") from None
        with file:
            yield file


def _open(path: str) -> BinaryIO:
    if os.path.isdir(path):
        suffixes = tuple(suffix for form in file_formats() for suffix in form.SUFFIXES)
        inside = sorted(name for name in os.listdir(path) if name.endswith(suffixes))
        if inside:
            raise Fault("is a folder", f"Use a file in it: {listed(inside, 5)}.")
        raise Fault("is a folder without shards of a checkpoint", "Use a file, or the folder with all shards.")
    # Without O_NONBLOCK, opening a pipe blocks until something writes to it.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise Fault("is a pipe or a device, not a file")


def describe(file: BinaryIO, path: str) -> Structure:
    """Read the description in an open file, and check it against the file's contents."""
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(1024)
    with faults_of(path):
        for form in file_formats():
            if form.recognizes(head):
                with collector_paused(), any_error_is(damaged("its description and its contents do not match")):
                    return dataclasses.replace(form.describe(file, path, size_bytes), form=form)
        raise _something_else(head, size_bytes)


def _something_else(head: bytes, size_bytes: int) -> Fault:
    if not head:
        return Fault("is empty", "Probably the disk was full, or a save was interrupted.")
    text = head.lstrip()[:200].lower()
    for starts, what, advice in _OTHER_FILES:
        if head.startswith(starts) or text.startswith(starts):
            return Fault(what, advice)
    return Fault(f"is not a checkpoint: {format_bytes(size_bytes)} that begin with {head[:8]!r}", RESTORE)


class Folder:
    """A folder with the files of a checkpoint."""

    def __init__(self, path: str, stack: contextlib.ExitStack) -> None:
        self.path = path
        self._stack = stack

    def check_names(self, names: Iterable[Any]) -> list[str]:
        """Return each name once; raise unless the folder has a file or a link with each name."""
        unique = list(dict.fromkeys(names))
        for name in unique:
            if not is_plain_name(name):
                raise Fault(f"refers to a file outside its own folder: {printable(name)}", "It was not opened.")
        missing = [name for name in unique if not os.path.exists(os.path.join(self.path, name))]
        if missing:
            absent = f"{len(missing)} of {len(unique)} files are missing, {listed(missing, 3)}"
            advice = "Probably a save or a copy was interrupted. Copy all files again."
            raise Fault(f"is not complete: {absent}", advice)
        return unique

    def open(self, name: str) -> BinaryIO:
        """Open a file until the stack is closed."""
        return self._stack.enter_context(opened(os.path.join(self.path, name)))

    def describe(self, name: str) -> Structure:
        """Describe a file that is a checkpoint by itself."""
        return describe(self.open(name), os.path.join(self.path, name))


def is_plain_name(name: Any) -> bool:
    """Return whether this is a file name that stays inside its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)
