"""Source lines at which the host waits for the GPU, found in a few steps with torch's sync debug mode.

That mode does not report ``torch.cuda.synchronize()``, so calls to it are recorded separately. They are recorded below
that function, because replacing the function itself would make ``torch.compile`` recompile the code that calls it.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.phases import MONITORING, base_phase
from lightning_gpu_tools.training.run_measurements import WatchedSteps
from lightning_gpu_tools.training.source_lines import LineCounts, line_of
from lightning_gpu_tools.training.stopwatch import Stopwatch

_OFF = 0  # value of torch.cuda.get_sync_debug_mode()
_SYNC = "called a synchronizing CUDA operation"
# Inserted and removed by hand: warnings.filterwarnings() would make warnings that were shown once appear again.
_FILTER: Any = ("always", re.compile(f"{_SYNC}|Synchronization debug mode is a prototype"), UserWarning, None, 0)


class SyncLines:
    """A recorder of the training thread's waits for the GPU, and of queued operations, between ``start`` and ``stop``.

    ``synced`` is called after each wait.
    """

    def __init__(self, gpu: torch.device, clock: Stopwatch, synced: Callable[[], None]) -> None:
        self._gpu = gpu
        self._clock = clock
        self._synced = synced
        self._steps = 0
        self._operations = 0
        self._lines = LineCounts()
        self._before: Any = None  # original filters, showwarning, and synchronize; None while not recording
        self._thread = 0
        self._operations_before = 0

    def facts(self) -> WatchedSteps | None:
        """Return the waits so far; ``None`` before the first step."""
        if not self._steps:
            return None
        syncs = tuple(self._lines.lines())
        return WatchedSteps(steps=self._steps, operations=self._operations / self._steps, syncs=syncs)

    def start(self) -> None:
        """Start recording, unless the program already uses the mode."""
        if torch.cuda.get_sync_debug_mode() != _OFF:
            return
        self._thread = threading.get_ident()
        self._before = warnings.filters, warnings.showwarning, getattr(torch._C, compat.SYNCHRONIZE, None)
        warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined] # typed as a sequence
        warnings.showwarning = self._shown
        if self._before[2] is not None:
            setattr(torch._C, compat.SYNCHRONIZE, self._synchronized)
        torch.cuda.set_sync_debug_mode("warn")
        self._operations_before = self._count()

    def stop(self, *, is_whole: bool = True) -> None:
        """Restore everything, and count the step if it ``is_whole``. Idempotent."""
        if self._before is None:
            return
        (filters, shown, synchronize), self._before = self._before, None
        torch.cuda.set_sync_debug_mode("default")
        if _FILTER in filters:
            filters.remove(_FILTER)
        if warnings.showwarning == self._shown:
            warnings.showwarning = shown
        if getattr(torch._C, compat.SYNCHRONIZE, None) == self._synchronized:
            setattr(torch._C, compat.SYNCHRONIZE, synchronize)
        if is_whole:
            self._operations += self._count() - self._operations_before
            self._steps += 1

    def _shown(self, message: Any, category: Any, *where: Any, **more: Any) -> None:
        text = str(message)
        if category is UserWarning and _SYNC in text:
            self._note(sys._getframe(1))
        elif self._before is not None and not (category is UserWarning and _FILTER[1].match(text)):
            self._before[1](message, category, *where, **more)

    def _synchronized(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return (getattr(torch._C, compat.SYNCHRONIZE) if self._before is None else self._before[2])(*args, **kwargs)
        finally:
            self._note(sys._getframe(1))

    def _note(self, frame: FrameType | None) -> None:
        phase = self._clock.current.phase
        if threading.get_ident() == self._thread and base_phase(phase) != MONITORING:
            self._synced()  # first, because the GPU is idle now
            if (seen := line_of(frame)) is not None:
                self._lines.add(phase, seen.file, seen.line, seen.function)

    def _count(self) -> int:
        """Return the number of GPU memory allocations by torch: about one per operation."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._gpu)["allocation"]["all"]["allocated"])
