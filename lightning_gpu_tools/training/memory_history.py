"""How much memory this process used over a run: of the host, and of the GPU through torch's allocator."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch

from lightning_gpu_tools.host import read_host_budget
from lightning_gpu_tools.training.memory_growth import MemoryGrowth, steady_growth
from lightning_gpu_tools.training.timeline import Timeline

_MAX_POINTS = 500
_INTERVAL_S = 1.0
# Our default: what will be full within a day is reported while there is time to act; judging takes about a millisecond.
_ALARM_S = 24 * 3600.0
_ALARM_EVERY_S = 300.0


class MemoryHistory:
    """Samples the memory when asked to, but at most once a second.

    Args:
        device: Where the model is.
        clock: Returns the time in seconds.
        resident_bytes: Returns how much memory of the host the process uses; by default its RSS.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        resident_bytes: Callable[[], int] | None = None,
    ) -> None:
        process = psutil.Process()
        self._device = device
        self._clock = clock
        self._resident_bytes = resident_bytes or (lambda: process.memory_info().rss)
        self._due_s = 0.0
        self._alarm_due_s = clock() + _ALARM_EVERY_S
        self._alarmed: set[str] = set()
        self._resident = Timeline(_MAX_POINTS, _INTERVAL_S)
        self._allocated = Timeline(_MAX_POINTS, _INTERVAL_S)

    def poll(self) -> None:
        """Sample how much is used; costs some 50 microseconds if it is due, else nearly nothing."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _INTERVAL_S
        self._resident.add(now_s, self._resident_bytes())
        if self._device.type == "cuda":
            # The allocator's own count: it asks no driver and waits for no kernel.
            self._allocated.add(now_s, torch.cuda.max_memory_allocated(self._device))

    def alarms(self) -> list[MemoryGrowth]:
        """Return what grows steadily and will be full within a day, each once; checks only every five minutes."""
        now_s = self._clock()
        if now_s < self._alarm_due_s:
            return []
        self._alarm_due_s = now_s + _ALARM_EVERY_S
        full_soon = [growth for growth in self.growth() if growth.left_s is not None and growth.left_s < _ALARM_S]
        new = [growth for growth in full_soon if growth.what not in self._alarmed]
        self._alarmed.update(growth.what for growth in new)
        return new

    def growth(self) -> tuple[MemoryGrowth, ...]:
        """Return what grew steadily up to now."""
        room_bytes = read_host_budget().memory_available_bytes
        found = [steady_growth("The memory of the process (RSS)", self._resident.points(), room_bytes)]
        if self._device.type == "cuda":
            total_bytes = torch.cuda.get_device_properties(self._device).total_memory
            free_bytes = total_bytes - torch.cuda.max_memory_allocated(self._device)
            found.append(steady_growth("The GPU memory (the allocator's peak)", self._allocated.points(), free_bytes))
        return tuple(growth for growth in found if growth is not None)
