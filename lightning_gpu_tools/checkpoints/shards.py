"""What the formats of several files share: their folder, and whether parts make up a whole."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.describing import describe
from lightning_gpu_tools.checkpoints.faults import Fault, damaged
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.checkpoints.opening import opened
from lightning_gpu_tools.checkpoints.structure import Structure
from lightning_gpu_tools.units import printable


class Folder:
    """A folder with the files of a checkpoint."""

    def __init__(self, path: str, stack: contextlib.ExitStack) -> None:
        self.path = path
        self._stack = stack

    def check_names(self, names: Iterable[Any]) -> list[str]:
        """Return each name once; raise unless there is a file, or a link, of this name in the folder."""
        unique = list(dict.fromkeys(names))
        for name in unique:
            if not is_plain_name(name):
                raise Fault(f"names a file outside of its own folder: {printable(name)}", "Nothing of it was opened.")
        missing = [name for name in unique if not os.path.exists(os.path.join(self.path, name))]
        if missing:
            gone = f"{len(missing)} of {len(unique)} files are missing, {listed(missing, 3)}"
            raise Fault(
                f"is not complete: {gone}", "Most likely a save or a copy was interrupted. Copy all files again."
            )
        return unique

    def open(self, name: str) -> BinaryIO:
        """Open a file until the stack is closed."""
        return self._stack.enter_context(opened(os.path.join(self.path, name)))

    def describe(self, name: str) -> Structure:
        """Describe a file that is a checkpoint of its own."""
        return describe(self.open(name), os.path.join(self.path, name))


def is_plain_name(name: Any) -> bool:
    """Whether this names nothing outside of its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)


def check_cover(name: str, shape: tuple[int, ...], blocks: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raise unless blocks, given by their offsets and sizes, fill a shape without gaps and overlaps."""
    if not _is_filled(shape, [(*zip(*block, strict=True),) for block in blocks if 0 not in block[1]]):
        raise damaged(f"the parts of {printable(name)} do not make up its shape {printable(shape)}")


def _is_filled(shape: tuple[int, ...], blocks: list[tuple[tuple[int, int], ...]]) -> bool:
    if 0 in shape or not shape:
        return len(blocks) == (0 not in shape)
    rows: dict[tuple[int, int], list[tuple[tuple[int, int], ...]]] = {}
    for (offset, size), *rest in blocks:
        rows.setdefault((offset, size), []).append(tuple(rest))
    end = 0
    for offset, size in sorted(rows):
        if offset != end:
            return False
        end += size
    return end == shape[0] and all(_is_filled(shape[1:], below) for below in rows.values())
