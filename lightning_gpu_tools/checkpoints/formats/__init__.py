"""One module per checkpoint format, which recognizes and describes it without torch and without running its code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, BinaryIO, Protocol

if TYPE_CHECKING:
    from lightning_gpu_tools.checkpoints.opening import Folder
    from lightning_gpu_tools.checkpoints.structure import Assembly, Structure


class FileFormat(Protocol):
    """The functions of a module for a single-file format."""

    def recognizes(self, head: bytes) -> bool:
        """Return whether a file that begins with ``head`` is of this format."""

    def describe(self, file: BinaryIO, path: str, size_bytes: int) -> Structure:
        """Read the description in an open file and check it against the file's contents."""


class FolderFormat(Protocol):
    """The functions of a module for a format with several files."""

    FILES: re.Pattern[str]  # names of which a folder of this format has at least one
    PART: re.Pattern[str]  # names of files that are not a checkpoint without the others

    def describe(self, folder: Folder, names: set[str], *, to_load: bool) -> Assembly:
        """Describe the files, with the places of all numbers if that costs no time or ``to_load`` is true."""
