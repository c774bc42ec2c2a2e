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

from lightning_gpu_tools.patches import Patches
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
        self._patches = Patches()
        self._is_recording = False
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
        self._thread, self._is_recording = threading.get_ident(), True
        self._patches.add_to(warnings.filters, _FILTER)  # type: ignore[arg-type] # typed as a sequence
        self._patches.put(warnings, "showwarning", self._noting_syncs)
        self._patches.put(torch._C, compat.SYNCHRONIZE, self._noting_calls)
        self._patches.set_value(torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode, "warn")
        self._operations_before = self._count()

    def stop(self, *, is_whole: bool = True) -> None:
        """Restore everything, and count the step if it ``is_whole``. Idempotent."""
        if not self._is_recording:
            return
        self._is_recording = False
        self._patches.undo()
        if is_whole:
            self._operations += self._count() - self._operations_before
            self._steps += 1

    def _noting_syncs(self, show: Callable[..., None]) -> Callable[..., None]:
        def shown(message: Any, category: Any, *where: Any, **more: Any) -> None:
            text = str(message)
            if category is UserWarning and _SYNC in text:
                self._note(sys._getframe(1))
            elif not (category is UserWarning and _FILTER[1].match(text)):
                show(message, category, *where, **more)

        return shown

    def _noting_calls(self, synchronize: Callable[..., Any]) -> Callable[..., Any]:
        def synchronized(*args: Any, **kwargs: Any) -> Any:
            try:
                return synchronize(*args, **kwargs)
            finally:
                self._note(sys._getframe(1))

        return synchronized

    def _note(self, frame: FrameType | None) -> None:
        phase = self._clock.current.phase
        if threading.get_ident() == self._thread and base_phase(phase) != MONITORING:
            self._synced()  # first, because the GPU is idle now
            if (seen := line_of(frame)) is not None:
                self._lines.add(phase, seen.file, seen.line, seen.function)

    def _count(self) -> int:
        """Return the number of GPU memory allocations by torch: about one per operation."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._gpu)["allocation"]["all"]["allocated"])
