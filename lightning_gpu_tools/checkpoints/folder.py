"""The folder that the formats of several files have in common."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.describing import describe
from lightning_gpu_tools.checkpoints.faults import Fault
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
