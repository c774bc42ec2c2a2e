"""Functions that open and describe a checkpoint file, or one file of a folder, without torch and without its code."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.faults import Fault, any_error_is, damaged, faults_of
from lightning_gpu_tools.checkpoints.file_kinds import HEAD_BYTES, other_file, unpacked
from lightning_gpu_tools.checkpoints.formats import file_formats
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.checkpoints.structure import Structure
from lightning_gpu_tools.collector import collector_paused
from lightning_gpu_tools.errors import CheckpointNotFoundError
from lightning_gpu_tools.files import local_copy
from lightning_gpu_tools.units import printable, printable_path


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
        for folder in (path, *(os.path.join(path, name) for name in sorted(os.listdir(path)))):
            if os.path.isfile(os.path.join(folder, "data.pkl")):
                raise unpacked(os.path.abspath(folder))
        raise Fault("is a folder without shards of a checkpoint", "Use a file, or the folder with all shards.")
    return open(path, "rb")


def describe(file: BinaryIO, path: str) -> Structure:
    """Read the description in an open file, and check it against the file's contents."""
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(HEAD_BYTES)
    with faults_of(path):
        for form in file_formats():
            if form.recognizes(head):
                with collector_paused(), any_error_is(damaged("its description and its contents do not match")):
                    return form.describe(file, path, size_bytes)
        raise other_file(path, size_bytes, head)


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
