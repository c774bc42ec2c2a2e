"""A reader of single facts, so that one that cannot be read costs only itself."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from lightning_gpu_tools.units import printable

_Fact = TypeVar("_Fact")


class SafeReader:
    """A reader of facts, for any thread: one that cannot be read is left out, and listed in the report."""

    def __init__(self) -> None:
        self.unread: dict[str, str] = {}  # names of facts that could not be read, and the reason

    def read(self, what: str, read: Callable[[], _Fact], missing: _Fact) -> _Fact:
        """Return a fact, or ``missing`` if reading it raises an error (a new torch, a driver, an odd batch)."""
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - the rest can still be measured
            self.note_unread(what, error)
            return missing

    def note_unread(self, what: str, error: Exception) -> None:
        """Record a fact that could not be read."""
        # As text, because its frames would keep a batch; with this function, because str(error) may raise.
        self.unread[what] = printable("".join(traceback.format_exception_only(error)).strip(), 200)
