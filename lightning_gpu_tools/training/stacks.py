"""Activity of processes and threads that may hang, from /proc and Python stacks."""

from __future__ import annotations

import faulthandler
import os
import platform
import re
import signal
import sys
import sysconfig
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from lightning_gpu_tools.collector import frames_kept
from lightning_gpu_tools.processes import TICKS_PER_S, read_kernel_file
from lightning_gpu_tools.training.stall_facts import Activity, Frame, Wait

# System calls by what they wait for, from the kernel's arch/x86/entry/syscalls/syscall_64.tbl and
# include/uapi/asm-generic/unistd.h (arm64). For read and write, that depends on their file descriptor.
_CALLS: dict[str, dict[Wait, set[int]]] = {
    "x86_64": {
        "storage": {2, 3, 4, 5, 6, 17, 18, 21, 26, 74, 75, 77, 78, 82, 83, 87, 89, 217, 257, 258, 262, 263, 264, 269}
        | {285, 316, 332, 437, 439},
        "network": {42, 43, 44, 45, 46, 47, 288, 299, 307},
        "lock": {202},
        "time": {35, 230},
        "events": {7, 23, 232, 270, 271, 281},
        "process": {61, 247},
    },
    "aarch64": {
        "storage": {34, 35, 38, 46, 47, 48, 56, 57, 61, 67, 68, 78, 79, 80, 82, 83, 227, 276, 291, 437},
        "network": {202, 203, 206, 207, 211, 212, 242, 243, 269},
        "lock": {98},
        "time": {101, 115},
        "events": {22, 72, 73},
        "process": {95, 260},
    },
}
# read, write, readv, writev
_OF_DESCRIPTORS = {"x86_64": {0, 1, 19, 20}, "aarch64": {63, 64, 65, 66}}
_LOCKING = {"x86_64": {72, 73}, "aarch64": {25, 32}}  # fcntl, flock
_MACHINE = platform.machine()
_PROC = Path("/proc")


def read_proc(*path: object) -> str:
    """Return the text of a file in ``/proc``; empty if its process has ended or is hidden."""
    return read_kernel_file(_PROC.joinpath(*map(str, path)))


def stat_fields(*path: object) -> list[str]:
    """Return the fields of proc_pid_stat(5) after the name, starting with the state; empty like ``read_proc``."""
    return read_proc(*path, "stat").rpartition(")")[2].split()


def io_counters(pid: object) -> dict[str, int]:
    """Return the counters of proc_pid_io(5), by name; empty like ``read_proc``."""
    words = read_proc(pid, "io").replace(":", "").split()
    return {name: int(count) for name, count in zip(words[::2], words[1::2], strict=False)}


class ThreadTimes(NamedTuple):
    """The seconds that a thread has run, and those in which it was runnable but had no core."""

    ran_s: float
    delayed_s: float


def thread_times(pid: object = "self") -> dict[int, ThreadTimes]:
    """Return the times of each thread of a process, by thread ID; empty if it has ended, or they are not counted."""
    with suppress(OSError):
        counts = {
            int(one): read_proc(pid, "task", one, "schedstat").split() for one in os.listdir(_PROC / str(pid) / "task")
        }
        # In nanoseconds: the kernel's sched-stats.rst.
        return {thread: ThreadTimes(int(of[0]) / 1e9, int(of[1]) / 1e9) for thread, of in counts.items() if of}
    return {}


def added_times(before: dict[int, ThreadTimes], now: dict[int, ThreadTimes]) -> ThreadTimes:
    """Return the times that the threads of a process have added since ``before``."""
    since = [(times, before.get(thread, ThreadTimes(0.0, 0.0))) for thread, times in now.items()]
    return ThreadTimes(
        sum(times.ran_s - earlier.ran_s for times, earlier in since),
        sum(times.delayed_s - earlier.delayed_s for times, earlier in since),
    )


def _value(text: str, name: str) -> str | None:
    return next((line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:")), None)


def activity(pid: int, thread: int | None = None) -> Activity | None:
    """Return a process's or thread's activity, even if hung in the kernel; ``None`` if unknown. Takes about 50 µs."""
    folder = (pid,) if thread is None else (pid, "task", thread)
    fields = stat_fields(*folder)
    if not fields:
        return None
    waits_for, target = _wait(folder, fields[0])
    return Activity(pid, fields[0], waits_for, target, (int(fields[11]) + int(fields[12])) / TICKS_PER_S)


def _wait(folder: tuple[object, ...], state: str) -> tuple[Wait | None, str | None]:
    call = read_proc(*folder, "syscall").split()  # a number and its arguments; "running"; or "-1" outside a call
    number = int(call[0]) if call and call[0].lstrip("-").isdecimal() else -1
    is_locking = number in _LOCKING.get(_MACHINE, ())
    if is_locking or number in _OF_DESCRIPTORS.get(_MACHINE, ()):
        with suppress(OSError):
            target = os.readlink(_PROC.joinpath(*map(str, folder), "fd", str(int(call[1], 16))))  # needs no disk access
            if is_locking:
                return "file lock", target
            kind = target.partition(":")[0]
            return ("pipe" if kind == "pipe" else "network" if kind == "socket" else "storage"), target
    if state == "D":
        return "storage", None
    return next((wait for wait, numbers in _CALLS.get(_MACHINE, {}).items() if number in numbers), None), None


def catches(pid: int, signal_number: int) -> bool:
    """Return whether a process handles a signal, which would otherwise end it."""
    mask = _value(read_proc(pid, "status"), "SigCgt") or "0"
    return bool(int(mask, 16) >> (signal_number - 1) & 1)


def swapped_pages() -> int:
    """Return the number of pages that the machine has swapped in and out since it started."""
    words = read_proc("vmstat").split()
    counts = dict(zip(words[::2], words[1::2], strict=False))
    return int(counts.get("pswpin", 0)) + int(counts.get("pswpout", 0))


def memory_stall_percent() -> float:
    """Return the percentage of the last ten seconds in which all tasks waited for memory; 0 if unknown."""
    for line in read_proc("pressure", "memory").splitlines():
        kind, average, *_ = line.split()
        if kind == "full":
            return float(average.partition("=")[2])
    return 0.0


_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN = str(Path(__file__).parents[1]) + os.sep
# Rarely used by programs: one of Linux's last real-time signals.
_SIGNAL: int = getattr(signal, "SIGRTMAX", 64) - 3  # not used on macOS, which also lacks memfd_create
_ANSWER_S = 0.3  # our default; on an idle core it takes microseconds
_POLL_S = 0.02
_LINE = re.compile(r'^\s*File "(.*)", line (\d+) in (.+)$', re.MULTILINE)


def _frame(file: str, line: int, function: str) -> Frame:
    return Frame(file, line, function, file.startswith((*_LIBRARIES, "<frozen")) or "site-packages" in file)


def frames_of(thread: int) -> list[FrameType]:
    """Return the stack of a thread, outermost call first; empty if it has ended. Takes about 40 µs."""
    with frames_kept():
        frame = sys._current_frames().get(thread)
        return [] if frame is None else [one for one, _ in traceback.walk_stack(frame)][::-1]


def frames_in(text: str) -> tuple[Frame, ...]:
    """Parse the stack of a thread as written by faulthandler, outermost call first."""
    return tuple(_frame(file, int(line), function) for file, line, function in _LINE.findall(text))[::-1]


# Functions in which Lightning's Trainer passes control to the loops.
TRAINER_FILE, TRAINER_FUNCTIONS = os.path.join("trainer", "trainer.py"), ("fit", "_run_stage")


def stack_in_fit(frames: list[FrameType]) -> tuple[Frame, ...]:
    """Return the calls inside the Trainer's, if there is one, without those of this package."""
    calls = [_frame(one.f_code.co_filename, one.f_lineno or 0, one.f_code.co_name) for one in frames]
    stack = tuple(call for call in calls if not call.file.startswith(_OWN))
    for i, call in reversed(list(enumerate(stack))):
        if call.function in TRAINER_FUNCTIONS and call.file.endswith(TRAINER_FILE):
            return stack[i + 1 :]
    return stack


class ForkedStacks:
    """A way to get the stacks of processes that are forked from now on, even while they run C code.

    They inherit a signal handler that writes into a file in memory. Others never get the signal, which would end them.
    """

    def __init__(self) -> None:
        self._file = -1
        # An existing handler of other code stays.
        if hasattr(os, "memfd_create") and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            self._file = os.memfd_create("stacks")
            faulthandler.register(_SIGNAL, file=self._file, all_threads=False)

    def ask(self, pid: int) -> tuple[Frame, ...]:
        """Request and return the stack of a process, innermost call last; empty without an answer."""
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
        return frames_in(text)

    def close(self) -> None:
        """Remove this process's signal handler."""
        if self._file >= 0:
            faulthandler.unregister(_SIGNAL)
            os.close(self._file)
            self._file = -1
