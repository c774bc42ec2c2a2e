"""One module per checkpoint format, which recognizes, describes and loads it without running any of its code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from lightning_gpu_tools.checkpoints.opening import Folder
    from lightning_gpu_tools.checkpoints.structure import Assembly, LoadFile, Structure


class FileFormat(Protocol):
    """The functions of a module for a single-file format."""

    def recognizes(self, head: bytes) -> bool:
        """Return whether a file that begins with ``head`` is of this format."""

    def describe(self, file: BinaryIO, path: str, size_bytes: int) -> Structure:
        """Read the description in an open file and check it against the file's contents."""

    def load(self, structure: Structure, map_location: Any, weights_only: bool) -> Any:
        """Load a described file; its numbers are mapped where possible."""


class FolderFormat(Protocol):
    """The functions of a module for a format with several files."""

    PART: re.Pattern[str]  # names of files that are not a checkpoint without the others

    def find(self, path: str, names: set[str]) -> str | None:
        """Return the folder with the checkpoint's files, based on ``names``; ``None`` if it has another format."""

    def describe(self, folder: Folder, names: set[str], *, to_load: bool) -> Assembly:
        """Describe the files, with the places of all numbers if that costs no time or ``to_load`` is true."""

    def load(self, assembly: Assembly, load_file: LoadFile, map_location: Any) -> Any:
        """Load a described folder; its tensors are mapped, or joined when they are used."""
