"""Phrases about a stalled process: its activity, its source line, and its phase."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.training.phases import CALLBACK, LOGGING, PHASES, TRAINING_STEP
from lightning_gpu_tools.training.stall_facts import SETUP, TEARDOWN, Frame, ProcessFacts
from lightning_gpu_tools.units import printable

_COMPUTES = 0.2  # our default, in cores: a process that uses less is waiting


def is_idle(process: ProcessFacts) -> bool:
    """Return whether a process waits instead of computing."""
    return process.cpu_share < _COMPUTES


def does(process: ProcessFacts) -> str:
    """Return a process's activity and its source line: ``"waits for a lock in __getitem__ (data.py:41)"``."""
    if process.waits_for == "storage":
        activity = "waits for storage" + (f" ({printable(process.file)})" if process.file else "")
    elif not is_idle(process):
        activity = f"computes ({100 * process.cpu_share:.0f} % of a core)"
    else:
        activity = "waits for a lock" if process.waits_for == "lock" else "waits"
    return activity + where(process.stack)


def where(stack: Sequence[Frame]) -> str:
    """Return the innermost call in the user's program: ``" in __getitem__ (data.py:41)"``; empty without a stack."""
    frame = next((frame for frame in reversed(stack) if not frame.is_library), stack[-1] if stack else None)
    return "" if frame is None else f" in {printable(frame.function)} ({printable(frame.file)}:{frame.line})"


def during(phase: str) -> str:
    """Return a phase as a phrase: ``"while waiting for data"``."""
    base, _, name = phase.partition("/")
    if name and base in (CALLBACK, LOGGING, TRAINING_STEP):
        return f"in {printable(name)}"
    words = {SETUP: "during setup", TEARDOWN: "after its last step", TRAINING_STEP: "in the training step"}
    label = PHASES[base].label if base in PHASES else printable(base)
    return words.get(base) or (f"while {label}" if label.split()[0].endswith("ing") else f"in {label}")
