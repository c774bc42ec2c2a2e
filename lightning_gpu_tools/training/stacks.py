"""Activity of processes and threads that may hang: from /proc, Python stacks, and torch's record of collectives."""

import faulthandler
import json
import math
import os
import platform
import re
import signal
import sys
import sysconfig
import time
import traceback
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch

from lightning_gpu_tools.patches import frames_kept
from lightning_gpu_tools.processes import process_stat, read_kernel_file
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.stall_facts import Call, Frame, GroupCalls, Wait

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


def cpu_seconds(process: str) -> float:
    """Return the CPU time of a process or a thread ``"PID/task/TID"``; 0 if unknown."""
    stat = process_stat(process)
    return 0.0 if stat is None else stat.cpu_s


def activity(process: str) -> tuple[str, Wait | None, str | None]:
    """Return the state of a process or a thread, what it waits for, and the file that it reads or writes.

    Works even if it hangs in the kernel, and takes about 50 µs. The state is ``"X"`` if it has ended.
    """
    stat = process_stat(process)
    state = "X" if stat is None else stat.state
    calls = _CALLS.get(_MACHINE, {})
    call = read_proc(process, "syscall").split()  # a number and its arguments; "running"; or "-1" outside a call
    number = int(call[0]) if call and call[0].isdecimal() else -1
    if number in calls.get("descriptor", ()):
        with suppress(OSError):
            # Reading this link needs no disk access.
            file = os.readlink(_PROC / process / "fd" / str(int(call[1], 16)))
            return state, None if file.startswith(("pipe:", "socket:")) else "storage", file
    if state == "D" or number in calls.get("path", ()):
        return state, "storage", None
    return state, "lock" if number in calls.get("lock", ()) else None, None


def memory_stall_percent() -> float:
    """Return the percentage of the last ten seconds in which all tasks waited for memory; 0 if unknown."""
    found = re.search(r"^full avg10=(\S+)", read_proc("pressure", "memory"), re.MULTILINE)
    return 0.0 if found is None else float(found[1])


# Owner of a file's code. In `fetch`, torch's loader calls the program; in `trainer`, the Trainer does.
_Owner = Literal["user", "library", "torch", "python", "own", "fetch", "trainer"]
PACKAGES = ("/site-packages/", "/dist-packages/")
_PYTHON = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
_OWN = f"{Path(__file__).parents[1]}/"
_TRAINER_FILES = ("/lightning/pytorch/trainer/trainer.py", "/pytorch_lightning/trainer/trainer.py")
TRAINER_FUNCTIONS = ("fit", "_run_stage")  # in which Lightning's Trainer passes control to the loops


@lru_cache(10_000)  # our default
def owner_of(path: str) -> _Owner:
    """Return whose code a file has."""
    if path.endswith("/torch/utils/data/_utils/fetch.py"):
        return "fetch"
    if path.endswith(_TRAINER_FILES):
        return "trainer"
    if path.startswith(_OWN):
        return "own"
    for part in PACKAGES:
        if part in path:
            return "torch" if path.rpartition(part)[2].startswith("torch/") else "library"
    is_typed = path.startswith(("<stdin>", "<python-input", "<ipython-input"))
    return "python" if path.startswith((*_PYTHON, "<")) and not is_typed else "user"


# Rarely used by programs: one of Linux's last real-time signals.
_SIGNAL = signal.SIGRTMAX - 3
_ANSWER_S = 0.3  # our default; on an idle core it takes microseconds
_POLL_S = 0.02
_LINE = re.compile(r'^\s*File "(.*)", line (\d+) in (.+)$', re.MULTILINE)


def _frame(file: str, line: int, function: str) -> Frame:
    return Frame(file, line, function, owner_of(file) != "user")


def frames_of(thread: int) -> list[FrameType]:
    """Return the stack of a thread, outermost call first; empty if it has ended. Takes about 40 µs."""
    with frames_kept():
        frame = sys._current_frames().get(thread)
        return [] if frame is None else [one for one, _ in traceback.walk_stack(frame)][::-1]


def stack_in_fit(frames: list[FrameType]) -> tuple[Frame, ...]:
    """Return the calls inside the Trainer's, if there is one, without those of this package."""
    calls = [_frame(one.f_code.co_filename, one.f_lineno or 0, one.f_code.co_name) for one in frames]
    stack = tuple(call for call in calls if owner_of(call.file) != "own")
    for i, call in reversed(list(enumerate(stack))):
        if call.function in TRAINER_FUNCTIONS and owner_of(call.file) == "trainer":
            return stack[i + 1 :]
    return stack


class WorkerStacks:
    """A file in memory into which workers write their stacks at a signal, even while they run C code."""

    def __init__(self) -> None:
        self._file = os.memfd_create("stacks")
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


# Our defaults, so that other ranks can read the calls of all groups in one entry.
_MAX_DONE, _MAX_OPEN = 8, 32  # calls of a group that have ended, and that have not
_MAX_GROUPS = 8  # those with open calls first

# torch's internal names of collectives that users call by another name.
_PUBLIC_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "all_reduce_barrier": "barrier",
}
# Collectives to which each rank passes the same number of elements, by torch.distributed's documentation.
_EQUAL_SIZES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


def called_collectives() -> tuple[GroupCalls, ...]:
    """Return the last collectives of each process group; empty if torch has no record that can be read.

    Call this from a thread during a stall: it holds the GIL for up to 0.1 s. It queries the GPU whether collectives
    have completed, and does not wait for them.
    """
    groups: dict[tuple[str, str], dict[int, Call]] = {}
    try:
        for record in compat.collective_records():
            for entry in json.loads(record).get("entries", ()):
                if not entry["is_p2p"]:  # sends and receives have no number that ranks share
                    name, description = entry["process_group"]
                    backend, _, operation = entry["profiling_name"].partition(":")
                    call = _call(entry, _PUBLIC_NAMES.get(operation, operation))
                    description = "" if description == "default_pg" else description
                    groups.setdefault((f"{backend} {name}", description), {})[call.number] = call
    except (RuntimeError, AttributeError, KeyError, TypeError, ValueError):
        return ()  # another version of the record
    found = []
    for group, calls in groups.items():
        ordered = [calls[number] for number in sorted(calls)]
        first = next((index for index, call in enumerate(ordered) if not call.is_done), len(ordered))
        found.append(GroupCalls(*group, ordered[max(0, first - _MAX_DONE) : first + _MAX_OPEN]))
    return tuple(sorted(found, key=lambda group: all(call.is_done for call in group.calls))[:_MAX_GROUPS])


def _call(entry: dict[str, Any], operation: str) -> Call:
    text = operation
    if operation in _EQUAL_SIZES and entry["input_sizes"]:
        name, count = entry["input_dtypes"][0].lower(), sum(map(math.prod, entry["input_sizes"]))
        dtype = str(getattr(torch, name, name)).removeprefix("torch.")  # torch.float is torch.float32
        text += f" of {count:,} {dtype} number{'s' * (count != 1)}"
    is_done = bool(entry["retired"]) or entry["state"] == "completed"
    return Call(int(entry["collective_seq_id"]), text, is_done)
