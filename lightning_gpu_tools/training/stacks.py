"""Python stacks of a training that may hang: of its thread, of forked workers, and while C code holds Python's lock."""

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

_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN = str(Path(__file__).parents[1]) + os.sep
# Hardly ever in use: one of Linux's last real-time signals.
_SIGNAL: int = getattr(signal, "SIGRTMAX", 64) - 3
_ANSWER_S = 0.3  # our default; on an idle core it takes microseconds
_POLL_S = 0.02
_LINE = re.compile(r'^\s*File "(.*)", line (\d+) in (.+)$', re.MULTILINE)
# They import faulthandler without using its timer.
_NO_TIMER = ("torch.", "joblib.", __name__)


def _frame(file: str, line: int, function: str) -> Frame:
    return Frame(file, line, function, file.startswith((*_LIBRARIES, "<frozen")) or "site-packages" in file)


def frames_of(thread: int) -> list[FrameType]:
    """Return the stack of a thread, outermost call first; empty if it has ended. Some 40 us."""
    frame = sys._current_frames().get(thread)
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


# Where Lightning's Trainer hands over to the loops.
_TRAINER_FILE, _TRAINER_FUNCTIONS = os.path.join("trainer", "trainer.py"), ("fit", "_run_stage")


def stack_in_fit(frames: list[FrameType]) -> tuple[Frame, ...]:
    """Return the calls below the Trainer's, if there is one, without those of this package."""
    calls = [(one.f_code.co_filename, one.f_lineno or 0, one.f_code.co_name) for one in frames]
    stack = tuple(_frame(*call) for call in calls if not call[0].startswith(_OWN))
    for i, call in reversed(list(enumerate(stack))):
        if call.function in _TRAINER_FUNCTIONS and call.file.endswith(_TRAINER_FILE):
            return stack[i + 1 :]
    return stack


class ForkedStacks:
    """Has processes that are forked from now on write their stacks on request, even while they run C code.

    They inherit a signal handler that writes into a file in memory; the signal would end others, which are not asked.
    """

    def __init__(self) -> None:
        self._file = -1
        # A handler of somebody else's stays.
        if hasattr(os, "memfd_create") and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            self._file = os.memfd_create("stacks")
            faulthandler.register(_SIGNAL, file=self._file, all_threads=False)

    def ask(self, pid: int) -> tuple[Frame, ...]:
        """Return the stack of a process, innermost call last; empty if it does not answer."""
        if self._file < 0 or not catches(pid, _SIGNAL):
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
        return tuple(_frame(file, int(line), function) for file, line, function in _LINE.findall(text))[::-1]

    def close(self) -> None:
        """Take off this process's handler."""
        if self._file >= 0:
            faulthandler.unregister(_SIGNAL)
            os.close(self._file)
            self._file = -1


class LockAlarm:
    """Has all stacks written to the terminal if C code holds Python's lock for too long.

    It uses faulthandler's only timer, unless anybody else may.
    """

    def __init__(self) -> None:
        self._is_free = all(
            name.startswith(_NO_TIMER)
            for name, module in list(sys.modules.items())
            # By __dict__: a lazy module's __getattr__ would import.
            if getattr(module, "__dict__", {}).get("faulthandler") is faulthandler
        )
        if self._is_free:
            _stop_at_forks()

    def arm(self, seconds: float) -> None:
        """Write all stacks after so long unless this is called again before. Takes 0.1 to 0.4 ms."""
        if self._is_free:
            with _arming, suppress(ValueError, OSError, RuntimeError):  # no terminal to write to
                faulthandler.dump_traceback_later(seconds, file=2)

    def close(self) -> None:
        """Write no stacks."""
        if self._is_free:
            with _arming:
                faulthandler.cancel_dump_traceback_later()


_arming = threading.Lock()


@functools.cache
def _stop_at_forks() -> None:
    """Stop the timer at each fork: a child's end would wait for the timer's thread, which is not there."""

    def stop() -> None:
        _arming.acquire()
        faulthandler.cancel_dump_traceback_later()

    os.register_at_fork(before=stop, after_in_parent=_arming.release, after_in_child=_arming.release)
