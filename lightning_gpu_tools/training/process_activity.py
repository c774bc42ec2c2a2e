"""What processes and threads of this job do, by /proc, which does not disturb them."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

from lightning_gpu_tools.training.stall_facts import Activity, Wait

# System calls by what they wait for, from the kernel's arch/x86/entry/syscalls/syscall_64.tbl and
# include/uapi/asm-generic/unistd.h (arm64). What read and write wait for is told by their file descriptor.
_CALLS: dict[str, dict[Wait, set[int]]] = {
    "x86_64": {
        "storage": {2, 3, 4, 5, 6, 17, 18, 21, 26, 72, 73, 74, 75, 77, 78, 82, 83, 87, 89, 217, 257, 258, 262, 263, 264}
        | {269, 285, 316, 332, 437, 439},
        "network": {42, 43, 44, 45, 46, 47, 288, 299, 307},
        "lock": {202},
        "time": {35, 230},
        "events": {7, 23, 232, 270, 271, 281},
        "process": {61, 247},
    },
    "aarch64": {
        "storage": {32, 34, 35, 38, 46, 47, 48, 56, 57, 61, 67, 68, 78, 79, 80, 82, 83, 227, 276, 291, 437},
        "network": {202, 203, 206, 207, 211, 212, 242, 243, 269},
        "lock": {98},
        "time": {101, 115},
        "events": {22, 72, 73},
        "process": {95, 260},
    },
}
# read, write, readv, writev
_OF_DESCRIPTORS = {"x86_64": {0, 1, 19, 20}, "aarch64": {63, 64, 65, 66}}
_MACHINE = platform.machine()
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PROC = Path("/proc")


def read_proc(*path: object) -> str:
    """Return a file below ``/proc``; nothing if its process has ended or is private, or without Linux."""
    try:
        return _PROC.joinpath(*map(str, path)).read_text(errors="replace")
    except OSError:
        return ""


def stat_fields(*path: object) -> list[str]:
    """Return the fields of proc_pid_stat(5) behind the name, from the state on; none as above."""
    return read_proc(*path, "stat").rpartition(")")[2].split()


def io_bytes(pid: object, counter: str) -> int | None:
    """Return a counter of proc_pid_io(5)."""
    value = _value(read_proc(pid, "io"), counter)
    return None if value is None else int(value)


def _value(text: str, name: str) -> str | None:
    return next((line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:")), None)


def activity(pid: int, thread: int | None = None) -> Activity | None:
    """Return what a process or a thread does, also if it hangs in the kernel; ``None`` if unknown. Some 50 us."""
    folder = (pid,) if thread is None else (pid, "task", thread)
    fields = stat_fields(*folder)
    if not fields:
        return None
    waits_for, target = _wait(folder, fields[0])
    return Activity(pid, fields[0], waits_for, target, (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)


def _wait(folder: tuple[object, ...], state: str) -> tuple[Wait | None, str | None]:
    call = read_proc(*folder, "syscall").split()  # a number and its arguments; "running"; "-1" outside of a call
    number = int(call[0]) if call and call[0].lstrip("-").isdecimal() else -1
    if number in _OF_DESCRIPTORS.get(_MACHINE, ()):
        with suppress(OSError):
            target = os.readlink(_PROC.joinpath(*map(str, folder), "fd", str(int(call[1], 16))))  # asks no disk
            kind = target.partition(":")[0]
            return ("pipe" if kind == "pipe" else "network" if kind == "socket" else "storage"), target
    if state == "D":
        return "storage", None
    return next((wait for wait, numbers in _CALLS.get(_MACHINE, {}).items() if number in numbers), None), None


def catches(pid: int, signal_number: int) -> bool:
    """Return whether a process has a handler for a signal, which would end it otherwise."""
    mask = _value(read_proc(pid, "status"), "SigCgt") or "0"
    return bool(int(mask, 16) >> (signal_number - 1) & 1)


def swapped_pages() -> int:
    """Return how many pages the machine has swapped in and out since it started."""
    words = read_proc("vmstat").split()
    counts = dict(zip(words[::2], words[1::2], strict=False))
    return int(counts.get("pswpin", 0)) + int(counts.get("pswpout", 0))


def memory_stall_percent() -> float:
    """Return for how much of the last ten seconds all tasks waited for memory; 0 if unknown."""
    for line in read_proc("pressure", "memory").splitlines():
        kind, average, *_ = line.split()
        if kind == "full":
            return float(average.partition("=")[2])
    return 0.0


def written_bytes() -> int:
    """Return how many bytes this process has handed to the kernel to write; 0 if unknown."""
    return io_bytes("self", "wchar") or 0
