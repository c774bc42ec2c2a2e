"""One module per checkpoint format, which recognizes and describes it without running any of its code.

A new format is a module here with the names of one of the two protocols, and an entry in ``_FILES`` or ``_FOLDERS``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from lightning_gpu_tools.checkpoints.opening import Folder
    from lightning_gpu_tools.checkpoints.structure import Assembly, Structure

# No two formats recognize the same file.
_FILES = ("torch_zip", "torch_legacy", "safetensors")
_FOLDERS = ("torch_distributed", "deepspeed", "shard_index")


class FileFormat(Protocol):
    """The names of a module for a format of single files."""

    NAME: str  # in the output of ``checkpoint inspect``

    def recognizes(self, head: bytes) -> bool:
        """Return whether a file that begins with ``head``, its first KiB, is of this format."""

    def describe(self, file: BinaryIO, path: str, size_bytes: int) -> Structure:
        """Read the description in an open file and check it against the file's contents.

        Errors to raise: :class:`Fault`, which may have advice; ``ValueError`` and the like mean that the
        description and the contents do not match. ``Structure.records`` have checksums for ``checkpoint verify``.
        """


class FolderFormat(Protocol):
    """The names of a module for a format with several files."""

    FILES: re.Pattern[str]  # names of which a folder of this format has at least one
    PART: re.Pattern[str]  # names of files that are not a checkpoint without the others

    def describe(self, folder: Folder, names: set[str], *, to_load: bool) -> Assembly:
        """Describe the files, with the places of all numbers if that costs no time or ``to_load`` is true."""


@cache
def file_formats() -> Sequence[FileFormat]:
    """Return the formats of single files."""
    modules: list[Any] = [import_module(f"{__name__}.{name}") for name in _FILES]
    return modules


@cache
def folder_formats() -> Sequence[FolderFormat]:
    """Return the formats with several files."""
    modules: list[Any] = [import_module(f"{__name__}.{name}") for name in _FOLDERS]
    return modules
