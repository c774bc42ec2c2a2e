"""One file for each format of a checkpoint: it recognizes, describes and loads it, without running anything of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from lightning_gpu_tools.checkpoints.opening import Folder
    from lightning_gpu_tools.checkpoints.structure import Assembly, LoadFile, Structure


class FileFormat(Protocol):
    """The functions of a module for a format of one file."""

    def recognizes(self, head: bytes) -> bool:
        """Whether a file that begins so is of this format."""

    def describe(self, file: BinaryIO, path: str, size_bytes: int) -> Structure:
        """Read the description of an open file and check it against what the file holds."""

    def load(self, structure: Structure, map_location: Any, weights_only: bool) -> Any:
        """Load what was described; its numbers are mapped where they can be."""


class FolderFormat(Protocol):
    """The functions of a module for a format of several files."""

    PART: re.Pattern[str]  # names of files that are no checkpoint without the others

    def find(self, path: str, names: set[str]) -> str | None:
        """Return the folder with its files, by the names in a folder; ``None`` if it is of no such format."""

    def describe(self, folder: Folder, names: set[str], *, to_load: bool) -> Assembly:
        """Describe the files, with the places of all numbers if it costs no time or ``to_load`` them."""

    def load(self, assembly: Assembly, load_file: LoadFile, map_location: Any) -> Any:
        """Load what was described; its tensors are mapped, or put together when they are used."""
