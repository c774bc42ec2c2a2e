"""Single facts about a training: one that cannot be read is left out, and named in the report."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from lightning_gpu_tools.units import printable

_Fact = TypeVar("_Fact")


class Facts:
    """A reader of single facts, for any thread."""

    def __init__(self) -> None:
        self.unread: dict[str, str] = {}  # facts that could not be read, in words, and why

    def read(self, what: str, read: Callable[[], _Fact], missing: _Fact) -> _Fact:
        """Return a fact, or ``missing`` if a new torch, a driver or an odd batch causes an error instead."""
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - whatever it is, the rest can be measured
            self.note_unread(what, error)
            return missing

    def note_unread(self, what: str, error: Exception) -> None:
        """Record a fact that could not be read."""
        # As text, because its frames would keep a batch; and by this function, because its own may raise.
        self.unread[what] = printable("".join(traceback.format_exception_only(error)).strip(), 200)
