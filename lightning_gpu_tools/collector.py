"""Pauses of Python's cyclic garbage collector."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_lock = threading.RLock()  # a signal's handler, or a finalizer, may run in between
_pauses = 0  # that have begun and not ended, in all threads
_was_enabled = False  # before the first of them


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector until the last thread leaves this context.

    It takes half the time of creating many objects, and finds nothing.
    """
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses = max(0, _pauses - 1)  # 0: this is a child that was forked in between
            if not _pauses and _was_enabled:
                gc.enable()


def frames_kept() -> AbstractContextManager[None]:
    """Return a context in which ``sys._current_frames``, and ``f_back`` and ``f_locals`` of its frames, may be used.

    In Python 3.11, these create objects, which may start a collection, which may let another thread run. If that thread
    returns from its function meanwhile, the new object is written over memory of its next calls, and the process
    crashes. If a thread starts or ends meanwhile, it waits forever for a lock that ``sys._current_frames`` holds. Later
    releases collect only between bytecodes; in earlier ones, all frames are objects.
    """
    return collector_paused() if sys.version_info[:2] == (3, 11) else nullcontext()


def _begin_in_child() -> None:
    """End the pauses of threads that a forked child does not have."""
    global _lock, _pauses
    _lock = threading.RLock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_begin_in_child)
