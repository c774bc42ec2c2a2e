"""Detection of C code that holds the GIL, so that no Python thread can run."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic  # by name: a program's tests may replace those of `time`
from types import ModuleType
from typing import Any, NamedTuple

from lightning_gpu_tools.processes import ProcessId, is_running, process_id
from lightning_gpu_tools.training.stacks import frames_in, innermost_in_fit, voluntary_switches
from lightning_gpu_tools.training.stall_facts import Frame

STACKS_NAME = "gpu_stacks.txt"  # next to the report of a run that may hang
_MAX_BYTES = 1 << 20  # read from it at most; faulthandler writes up to 100 calls for each of up to 100 threads
_TIMEOUT = re.compile(r"^Timeout \((\d+):(\d+):(\d+(?:\.\d+)?)\)!$", re.MULTILINE)
_THREAD = re.compile(r"^Thread (0x[0-9a-f]+).*:$", re.MULTILINE)
# A thread that waits for the GIL wakes up after each switch interval to request it; in a stopped process it does not.
# Sampling of source lines, which uses a shorter interval than Python's default, may begin or end during that time.
_SWITCH_S = 0.005  # Python's default (sys.setswitchinterval)
_MIN_WAITING_SHARE = 0.1  # of the time covered by these intervals; our default


class HeldLock(NamedTuple):
    """A case of C code that held the GIL for too long."""

    stack: tuple[Frame, ...]  # of the training thread, innermost call last
    lasted_s: float  # so far


class _Timer:
    """The faulthandler timer, one per process. The program's own use of it takes precedence."""

    def __init__(self) -> None:
        self.user: str | None = None  # "train.py uses", or "may use"
        self.lock = threading.RLock()
        self._later, self._cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later
        self._taken_until_s = 0.0
        self._is_ours = False  # whether the running timer is ours, not the program's
        self._due_s, self._file = 0.0, -1  # of our timer
        self._alarms = 0
        self._stops_at_forks = False

    def open(self) -> None:
        """Track other users of the timer from now on."""
        with self.lock:
            self._alarms += 1
            if self._alarms > 1:
                return
            self._later, self._cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later
            self.user = _earlier_user(self._later)
            self._taken_until_s = 0.0 if self.user is None else math.inf
            faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later = self._theirs, self._no_longer
            if not self._stops_at_forks:
                # A forked child would wait at exit for the timer's thread, which it does not have.
                os.register_at_fork(
                    before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self.lock.release
                )
                self._stops_at_forks = True

    def close(self) -> None:
        """Restore everything. A timer of the program keeps running."""
        with self.lock:
            self.stop()
            self._alarms -= 1
            if not self._alarms and faulthandler.dump_traceback_later == self._theirs:
                faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later = self._later, self._cancel

    def set(self, seconds: float, file: int) -> None:
        """Schedule a dump of all stacks in ``seconds``, unless the program uses the timer. Takes 0.1 to 0.4 ms."""
        with self.lock:
            if monotonic() > self._taken_until_s:
                with suppress(OSError, RuntimeError):  # the file is closed, or no thread can be started
                    self._later(min(seconds, threading.TIMEOUT_MAX), file=file)
                    self._is_ours, self._due_s, self._file = True, monotonic() + seconds, file

    def stop(self) -> None:
        with self.lock:
            if self._is_ours:
                self._is_ours = False
                self._cancel()

    def _before_fork(self) -> None:
        self.lock.acquire()
        if not self._is_ours:
            self._due_s = math.inf
        self.stop()

    def _after_fork(self) -> None:
        if self._due_s < math.inf:
            self.set(max(self._due_s - monotonic(), 0.001), self._file)
        self.lock.release()

    def _theirs(self, timeout: float, repeat: bool = False, *args: Any, **kwargs: Any) -> None:
        with self.lock:
            self._later(timeout, repeat, *args, **kwargs)
            self._is_ours = False
            self._taken_until_s = math.inf if repeat else monotonic() + timeout
            self.user = f"{sys._getframe(1).f_code.co_filename} uses"

    def _no_longer(self) -> None:
        with self.lock:
            self._is_ours = False
            self._cancel()
            self._taken_until_s = 0.0


_timer = _Timer()


def _earlier_user(later: Callable[..., None]) -> str | None:
    """Return the module that may have set the timer earlier, because faulthandler does not report it."""
    for name, module in list(sys.modules.items()):
        # Through __dict__, because a lazy module's __getattr__ would import.
        names = getattr(module, "__dict__", {})
        has_it = names.get("faulthandler") is faulthandler or names.get("dump_traceback_later") is later
        if name in (__name__, "faulthandler"):
            continue
        if (has_it or name == "__main__") and _calls_it(module, if_unknown=has_it):
            return f"{names.get('__file__') or name} may use"
    return None


def _calls_it(module: ModuleType, *, if_unknown: bool) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:  # python -c, a notebook
        return if_unknown
    try:
        return "dump_traceback_later" in Path(file).read_text(errors="replace")
    except OSError:
        return if_unknown


class LockAlarm:
    """A timer that writes the stacks of all threads unless it is set again in time.

    ``thread`` is the thread whose stack matters. One other thread calls :meth:`arm` and :meth:`take`.
    """

    def __init__(self, thread: int) -> None:
        self._header = json.dumps({"thread": thread, "process": process_id(os.getpid())}).encode() + b"\n"
        self._thread = thread
        self._watcher: int | None = None
        self._armed_s, self._after_s, self._switches = monotonic(), 0.0, 0
        self._path: Path | None = None
        self._file = self._opened(os.memfd_create("stacks")) if hasattr(os, "memfd_create") else -1  # -1: on macOS
        _timer.open()

    def _opened(self, file: int) -> int:
        os.write(file, self._header)
        return file

    @property
    def note(self) -> str | None:
        """Reason why a held GIL may not be detected; ``None`` if it would be detected."""
        if _timer.user is None:
            return None
        return f"C code that holds the GIL may not be detected: {_timer.user} faulthandler's timer."

    def keep_in(self, folder: Path) -> None:
        """Write the stacks to a file that survives a killed process. For a thread that may wait for a disk."""
        path = folder / STACKS_NAME
        if self._path is None and self._file >= 0 and folder.is_dir():
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
            file = self._opened(os.open(path, flags, 0o644))
            with _timer.lock:
                is_closed = self._file < 0  # closed during the wait for the disk
                if not is_closed:
                    file, self._file, self._path = self._file, file, path
                    left_s = self._armed_s + self._after_s - monotonic()
                    if left_s > 0:
                        _timer.set(left_s, self._file)
            os.close(file)
            if is_closed:
                path.unlink()

    def arm(self, seconds: float) -> None:
        """Schedule a dump of all stacks in ``seconds`` unless this is called again earlier."""
        self._watcher = threading.get_native_id()
        self._switches = voluntary_switches(self._watcher) or 0
        with _timer.lock:
            self._armed_s, self._after_s = monotonic(), seconds
            if self._file >= 0:
                _timer.set(seconds, self._file)

    def take(self) -> HeldLock | None:
        """Return the held lock in a new dump, once; ``None`` without a dump or if the process was stopped."""
        with _timer.lock:
            if self._file < 0 or os.fstat(self._file).st_size <= len(self._header):
                return None
            text = os.pread(self._file, _MAX_BYTES, 0).decode(errors="replace")
            os.ftruncate(self._file, len(self._header))
            os.lseek(self._file, 0, os.SEEK_END)
        lasted_s = monotonic() - self._armed_s
        if lasted_s < self._after_s:  # written just before it was armed again, as when a stopped process continues
            return None
        switches = None if self._watcher is None else voluntary_switches(self._watcher)
        interval_s = max(sys.getswitchinterval(), _SWITCH_S)
        waited_s = math.inf if switches is None else (switches - self._switches) * interval_s
        if waited_s < _MIN_WAITING_SHARE * lasted_s:
            return None
        return HeldLock(_stack_of(self._thread, text), lasted_s)

    def close(self) -> None:
        """Cancel the timer, and remove the file."""
        with _timer.lock:
            file, self._file = self._file, -1
            if file < 0:
                return
            _timer.close()
            os.close(file)
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()


def _stack_of(thread: int, text: str) -> tuple[Frame, ...]:
    _, *parts = _THREAD.split(text)
    stacks = dict(zip(parts[::2], parts[1::2], strict=True))
    return next((innermost_in_fit(frames_in(stack)) for one, stack in stacks.items() if int(one, 16) == thread), ())


def held_in(folder: Path, process: ProcessId | None) -> tuple[HeldLock, float] | None:
    """Return the held lock in the file of a process that did not continue, and its start, by ``time.time()``."""
    path = folder / STACKS_NAME
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return None
        with path.open("rb") as file:
            header, _, text = file.read(_MAX_BYTES).decode(errors="replace").partition("\n")
        found = json.loads(header)
        after = _TIMEOUT.search(text)
        if after is None or process is None or found["process"] != process:
            return None
        hours, minutes, seconds = map(float, after.groups())
        after_s = 3600 * hours + 60 * minutes + seconds
        since_s = status.st_mtime - after_s
        lasted_s = max(after_s, time.time() - since_s) if is_running(process) else after_s
        return HeldLock(_stack_of(int(found["thread"]), text), lasted_s), since_s
    except (OSError, ValueError, TypeError, KeyError):  # no such file, or it is forged
        return None
