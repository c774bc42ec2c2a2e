"""Python stacks of a training that may hang: of its thread, of forked workers, and where C code holds Python's lock."""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from lightning_gpu_tools.training.process_activity import catches
from lightning_gpu_tools.training.stall_facts import Frame

# Where code is that the user has not written: installed packages, Python's own library, and what has no file.
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN = str(Path(__file__).parents[1]) + os.sep
_MAX_FRAMES = 100
# The last real-time signals are the least likely to be in use; Lightning has SIGUSR1 and SIGUSR2.
_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None
# Our default: how long a process that has been asked may take to write its stack: microseconds, but for a busy core.
_ANSWER_S = 0.3
_POLL_S = 0.02
_LINE = re.compile(r'^\s*File "(.*)", line (\d+) in (.+)$', re.MULTILINE)
# They hold faulthandler without using its timer.
_NO_TIMER = ("torch.", "joblib.", __name__)


def frame_of(file: str, line: int, function: str) -> Frame:
    """Return a call, with whose code it is."""
    is_library = file.startswith((*_LIBRARIES, "<frozen")) or "site-packages" in file
    return Frame(file, line, function, is_library)


def frames_of(thread: int) -> list[FrameType]:
    """Return the calls on the stack of a thread of this process, outermost first; empty if it has ended. Some 40 us."""
    frame = sys._current_frames().get(thread)
    found: list[FrameType] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


# Where Lightning's Trainer hands over to the loops; what is around it says nothing.
_AROUND = (("fit", "_run_stage"), os.path.join("trainer", "trainer.py"))


def stack_in_fit(frames: list[FrameType]) -> tuple[Frame, ...]:
    """Return the calls below the Trainer's own; all of them without a Trainer."""
    stack = stack_of(frames)
    functions, file = _AROUND
    around = [i for i, one in enumerate(stack) if one.function in functions and one.file.endswith(file)]
    return stack[around[-1] + 1 :] if around else stack


def stack_of(frames: list[FrameType]) -> tuple[Frame, ...]:
    """Return the same as plain data, without calls of this package, which only stand around others."""
    calls = [(one.f_code.co_filename, one.f_lineno or 0, one.f_code.co_name) for one in frames]
    return tuple(frame_of(*call) for call in calls if not call[0].startswith(_OWN))


def _holds(module: object) -> bool:
    return getattr(module, "__dict__", {}).get("faulthandler") is faulthandler  # without a lazy module's __getattr__


class ForkedStacks:
    """Has processes that are forked from now on write their stacks when they are asked, also while C code runs in them.

    They inherit a handler of a signal, which writes into a file in memory that they inherit, too. Processes without the
    handler, as spawned ones, are not asked: the signal would end them.
    """

    def __init__(self) -> None:
        self._file = -1
        # A handler of somebody else's stays.
        if _SIGNAL is not None and hasattr(os, "memfd_create") and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            self._file = os.memfd_create("stacks")
            faulthandler.register(_SIGNAL, file=self._file, all_threads=False)

    def ask(self, pid: int) -> tuple[Frame, ...]:
        """Return the stack of a process, innermost last; empty if it cannot be asked or does not answer."""
        if self._file < 0 or _SIGNAL is None or not catches(pid, _SIGNAL):
            return ()
        before = os.fstat(self._file).st_size
        try:
            os.kill(pid, _SIGNAL)
        except ProcessLookupError:
            return ()
        until_s, size = time.monotonic() + _ANSWER_S, -1
        while time.monotonic() < until_s and (size == before or size != os.fstat(self._file).st_size):
            size = os.fstat(self._file).st_size
            time.sleep(_POLL_S)
        text = os.pread(self._file, 1 << 16, before).decode(errors="replace")
        return tuple(frame_of(file, int(line), function) for file, line, function in _LINE.findall(text))[::-1]

    def close(self) -> None:
        """Listen no more in this process."""
        if self._file >= 0 and _SIGNAL is not None:
            faulthandler.unregister(_SIGNAL)
            os.close(self._file)
            self._file = -1


class LockAlarm:
    """Has all stacks written to the terminal if Python's lock is held for so long that no thread can do it.

    It is a timer of faulthandler's, of which a process has one: it is left alone where anybody else may use it.
    """

    def __init__(self) -> None:
        holders = {name for name, one in list(sys.modules.items()) if _holds(one)}
        self._is_free = all(name.startswith(_NO_TIMER) for name in holders)
        if self._is_free:
            _stop_at_forks()

    def arm(self, seconds: float) -> None:
        """Write all stacks after so long, unless this is called again before. Takes some 0.1 to 0.4 ms."""
        if self._is_free:
            with _arming, suppress(ValueError, OSError, RuntimeError):  # no terminal to write to
                faulthandler.dump_traceback_later(seconds, file=2)

    def close(self) -> None:
        """Write nothing."""
        if self._is_free:
            with _arming:
                faulthandler.cancel_dump_traceback_later()


_arming = threading.Lock()


@functools.cache
def _stop_at_forks() -> None:
    """Stop the timer while a process is forked: its end would wait for the timer's thread, which it does not have."""

    def stop() -> None:
        _arming.acquire()
        faulthandler.cancel_dump_traceback_later()

    os.register_at_fork(before=stop, after_in_parent=_arming.release, after_in_child=_arming.release)
