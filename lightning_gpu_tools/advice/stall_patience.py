"""How long training may make no progress before it has stalled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_gpu_tools.training.phases import (
    CALLBACK,
    GARBAGE_COLLECTION,
    LOGGING,
    OUTSIDE_LOOP,
    PAUSES,
    base_phase,
)
from lightning_gpu_tools.training.stall_facts import SETUP, TEARDOWN, Frame

# Horovod's HOROVOD_STALL_CHECK_TIME_SECONDS: https://horovod.readthedocs.io/en/stable/stall_inspector_include.html
MIN_S = 60.0
# nvidia-resiliency-ext's factor for learned timeouts.
FACTOR = 5.0
# Our default for what takes long for good reasons. torch ends a process that waits for others after 600 s, with NCCL.
RARE_S = 450.0
_RARE = (SETUP, TEARDOWN, CALLBACK, LOGGING, *PAUSES)
_FIRST_STEPS = 3  # our default: until then, a part of a step may happen for the first time
_MIN_GAP_S = 5.0  # our default: a poll this late was suspended with the training, by Ctrl-Z or a scheduler

# torch.compile at work; its other files are on the stack while compiled code runs.
_COMPILES = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "torch/_inductor/async_compile.py",
    "torch/_inductor/runtime/triton_heuristics.py",
    "triton/compiler/",
)
_ASKS = ("/pdb.py", "/bdb.py", "pydevd", "debugpy", "/ipdb/", "/prompt_toolkit/", "/ipykernel/")


def limit_s(stall_after_s: float | Literal["auto"], longest_s: float, *, is_rare: bool) -> float:
    """Return the seconds without progress after which training has stalled.

    ``longest_s`` is the longest time without progress so far. ``is_rare`` is true outside of steps, and in the first
    ones.
    """
    if stall_after_s != "auto":
        return stall_after_s
    return max(RARE_S if is_rare else MIN_S, FACTOR * longest_s)


def is_excused(stack: Sequence[Frame]) -> bool:
    """Return whether a thread that seems to hang is compiling, or waiting for a person (debugger, notebook)."""
    files = [f"/{frame.file}" for frame in stack]
    # A notebook's kernel, or a debugger that is not at a breakpoint, is only at the outer end of the stack.
    begin = max((i for i, frame in enumerate(stack) if not frame.is_library), default=0)
    is_asking = any(part in file for file in files[begin:] for part in _ASKS)
    return is_asking or any(part in file for file in files for part in _COMPILES)


class Patience:
    """Measures how long training has made no progress, with a poll every ``interval_s``."""

    def __init__(self, stall_after_s: float | Literal["auto"], interval_s: float) -> None:
        self.stuck_s = 0.0  # time without progress
        self.limit_s = limit_s(stall_after_s, 0.0, is_rare=True)
        self.has_stalled = False
        self._stall_after_s, self._interval_s = stall_after_s, interval_s
        self._mark: object = None
        self._phase = SETUP
        self._since_s = self._polled_s = 0.0
        self._is_rare = True
        self._longest_s = {True: 0.0, False: 0.0}  # by whether it is rare

    def poll(self, now_s: float, mark: object, phase: str, steps: int) -> bool:
        """Return whether training has made progress since the last poll, after which ``mark`` or ``phase`` differ."""
        if phase == GARBAGE_COLLECTION:  # no progress: even an endless loop makes garbage
            phase = self._phase
        late_s = now_s - self._polled_s - self._interval_s
        if self._mark is not None and late_s > _MIN_GAP_S + self._interval_s:
            self._since_s += late_s
        self._polled_s = now_s
        has_progressed = (mark, phase) != (self._mark, self._phase)
        if has_progressed:
            self._longest_s[self._is_rare] = max(self._longest_s[self._is_rare], self.stuck_s)
            self._mark, self._phase, self._since_s = mark, phase, now_s
        self._is_rare = steps <= _FIRST_STEPS or base_phase(phase) in _RARE
        self.stuck_s = now_s - self._since_s
        self.limit_s = limit_s(self._stall_after_s, self._longest_s[self._is_rare], is_rare=self._is_rare)
        self.has_stalled = self.stuck_s >= self.limit_s and base_phase(phase) != OUTSIDE_LOOP
        return has_progressed

    def excuse(self) -> None:
        """Begin to measure anew."""
        self._since_s, self.stuck_s, self.has_stalled = self._polled_s, 0.0, False
