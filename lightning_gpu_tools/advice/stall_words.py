"""Phrases about a stalled process: its activity, its source line, and its phase; and about workers that stall it."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.training.phases import CALLBACK, LOGGING, PHASES, TRAINING_STEP
from lightning_gpu_tools.training.stall_facts import SETUP, TEARDOWN, Frame, StallFacts, Wait, WorkerFacts, users_frame
from lightning_gpu_tools.units import printable

_COMPUTES = 0.2  # our default, in cores: a process that uses less is waiting
_STATES: dict[Wait, str] = {
    "storage": "waits for storage",
    "network": "waits for the network",
    "lock": "waits for a lock",
    "file lock": "waits for a file that another process has locked",
    "pipe": "waits for another process",
    "time": "sleeps",
    "events": "waits for a file, a socket or another process",
    "process": "waits for another process to exit",
}


def does(process: StallFacts | WorkerFacts) -> str:
    """Return a process's activity: ``"waits for a lock"``."""
    activity, cpu_share = process.activity, process.cpu_share
    waits_for = None if activity is None else activity.waits_for
    if cpu_share >= _COMPUTES and waits_for != "storage":
        return f"computes ({100 * cpu_share:.0f} % of a core)"
    if activity is None or waits_for is None:
        return "makes no progress"
    return _STATES[waits_for] + (f" ({printable(activity.target)})" if activity.target else "")


def where(stack: tuple[Frame, ...]) -> str:
    """Return the innermost call in the user's program: ``" in __getitem__ (data.py:41)"``; empty if unknown."""
    frame = users_frame(stack) or (stack[-1] if stack else None)
    return "" if frame is None else f" in {printable(frame.function)} ({printable(frame.file)}:{frame.line})"


def that_line(stack: tuple[Frame, ...], otherwise: str) -> str:
    """Return a reference to the source line that ``where`` has named; ``otherwise`` if it has named none."""
    return "that line" if stack else otherwise


def does_where(process: StallFacts | WorkerFacts) -> str:
    """Return a process's activity and its source line."""
    return f"{does(process)}{where(process.stack)}"


def during(phase: str) -> str:
    """Return a phase as a phrase: ``"while waiting for data"``."""
    base, _, name = phase.partition("/")
    if name and base in (CALLBACK, LOGGING, TRAINING_STEP):
        return f"in {printable(name)}"
    words = {SETUP: "during setup", TEARDOWN: "after its last step", TRAINING_STEP: "in the training step"}
    label = PHASES[base].label if base in PHASES else printable(base)
    return words.get(base) or (f"while {label}" if label.split()[0].endswith("ing") else f"in {label}")


def awaited_of(workers: Sequence[WorkerFacts]) -> WorkerFacts:
    """Return the worker that has to deliver the next batch."""
    return next((one for one in workers if one.is_awaited), workers[0])


def is_idle(worker: WorkerFacts) -> bool:
    """Return whether a worker waits instead of computing."""
    return worker.cpu_share < _COMPUTES


def name_of(worker: WorkerFacts) -> str:
    """Return the name of a worker, for the beginning of a sentence."""
    return f"Worker {worker.number} (PID {worker.activity.pid})"
