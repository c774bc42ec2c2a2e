"""Reads single facts of a training: one that cannot be read is left out, and named in the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Fact = TypeVar("_Fact")


class Facts:
    """What could be read, in any thread."""

    def __init__(self) -> None:
        self.unread: dict[str, str] = {}  # what could not, in words, and why

    def read(self, what: str, read: Callable[[], _Fact], missing: _Fact) -> _Fact:
        """Return a fact, or what stands for it where a new torch, a driver or an odd batch has an error instead."""
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - whatever it is, the rest can be measured
            self.unread[what] = repr(error.with_traceback(None))  # whose frames would keep a batch
            return missing
