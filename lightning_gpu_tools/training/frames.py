"""Reading the stacks of running threads without letting the garbage collector crash the process."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_has_paused = False


@contextmanager
def frames_kept() -> Iterator[None]:
    """Return a context in which ``f_back`` and ``f_locals`` of other threads' frames may be read.

    It pauses the garbage collector, for Python 3.11 only. There, reading these creates objects, and that may start a
    collection, which may let the other thread run. If it returns from the function meanwhile, the new object is written
    over memory of its next calls, and the process crashes. Later releases collect only between bytecodes; in earlier
    ones, all frames are objects.
    """
    global _has_paused
    if sys.version_info[:2] != (3, 11):
        yield
        return
    with _lock:
        if gc.isenabled():
            gc.disable()
            _has_paused = True
        try:
            yield
        finally:
            if _has_paused:
                _has_paused = False
                gc.enable()


def _begin_in_child() -> None:
    """Undo a pause of a thread that a forked child does not have."""
    global _lock, _has_paused
    _lock = threading.Lock()
    if _has_paused:
        _has_paused = False
        gc.enable()


os.register_at_fork(after_in_child=_begin_in_child)
