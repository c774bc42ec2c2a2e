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
from lightning_gpu_tools.training.stall_facts import Frame, Wait

# System calls, from the kernel's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (arm64).
_CALLS: dict[str, dict[str, set[int]]] = {
    "x86_64": {
        "descriptor": {0, 1, 17, 18, 19, 20},  # read, write, and their variants, which take a file descriptor
        "path": {2, 3, 4, 5, 6, 21, 74, 75, 78, 82, 83, 87, 89, 217, 257, 258, 262, 263, 264, 269, 285, 332, 437},
        "lock": {202},  # futex
    },
    "aarch64": {
        "descriptor": {63, 64, 65, 66, 67, 68},
        "path": {34, 35, 38, 46, 47, 48, 56, 57, 61, 78, 79, 80, 82, 83, 276, 291, 437},
        "lock": {98},
    },
}
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


def cpu_seconds(pid: int, thread: int | None = None) -> float:
    """Return the CPU time of a process or a thread; 0 if unknown."""
    fields = stat_fields(*_folder(pid, thread))
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def activity(pid: int, thread: int | None = None) -> tuple[str, Wait | None, str | None]:
    """Return the state of a process or a thread, what it waits for, and the file that it reads or writes.

    Works even if it hangs in the kernel, and takes about 50 µs. The state is ``"X"`` if it has ended.
    """
    folder = _folder(pid, thread)
    state, *_ = stat_fields(*folder) or ["X" if _PROC.exists() else "S"]  # macOS has no /proc
    calls = _CALLS.get(_MACHINE, {})
    call = read_proc(*folder, "syscall").split()  # a number and its arguments; "running"; or "-1" outside a call
    number = int(call[0]) if call and call[0].isdecimal() else -1
    if number in calls.get("descriptor", ()):
        with suppress(OSError):
            # Reading this link needs no disk access.
            file = os.readlink(_PROC.joinpath(*map(str, folder), "fd", str(int(call[1], 16))))
            return state, None if file.startswith(("pipe:", "socket:")) else "storage", file
    if state == "D" or number in calls.get("path", ()):
        return state, "storage", None
    return state, "lock" if number in calls.get("lock", ()) else None, None


def _folder(pid: int, thread: int | None) -> tuple[object, ...]:
    return (pid,) if thread is None else (pid, "task", thread)


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


class WorkerStacks:
    """A file in memory into which workers write their stacks at a signal, even while they run C code."""

    def __init__(self) -> None:
        self._file = os.memfd_create("stacks") if hasattr(os, "memfd_create") else -1
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"  # for :func:`write_stack_at_signal` in a worker

    def ask(self, pid: int) -> tuple[Frame, ...]:
        """Request and return the stack of a process, innermost call last; empty without an answer."""
        # A process that does not handle the signal would be ended by it.
        caught = re.search(r"^SigCgt:\s*(\w+)", read_proc(pid, "status"), re.MULTILINE)
        if self._file < 0 or caught is None or not int(caught[1], 16) >> (_SIGNAL - 1) & 1:
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
        """Close the file, which workers that still run keep for themselves."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def write_stack_at_signal(path: str) -> None:
    """Let this process, a worker, write its stack into a file at the signal, unless it has a handler for that."""
    if signal.getsignal(_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(_SIGNAL, file=open(path, "ab"), all_threads=False)  # noqa: SIM115 - open until it ends
