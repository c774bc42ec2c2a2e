"""How much memory a training uses over a run: this process and the loader's workers; and whether that grows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from lightning_gpu_tools.host import private_memory_bytes, read_host_budget, resident_memory_bytes
from lightning_gpu_tools.training.memory_counters import MemoryCounters
from lightning_gpu_tools.training.memory_growth import MemoryGrowth, steady_growth
from lightning_gpu_tools.training.timeline import Timeline

_MAX_POINTS = 500
_INTERVAL_S = 1.0
# Our default: twice as often as growth needs to be judged after 12 s, because a thread is late on a busy machine, and
# until once a second is enough.
_EARLY_INTERVAL_S = 0.25
_EARLY_S = 60.0
# Our default: asking for the workers' memory takes at most one percent of this thread's time.
_WORKERS_EVERY = 100
# Our default: what will be full within a day is reported while there is time to act, once it was seen for five minutes.
# What was seen for a shorter time is believed in proportion: after 12 s, what will be full within an hour.
_ALARM_S = 24 * 3600.0
_ALARM_EVERY_S = 300.0
_FIRST_ALARM_S = 12.0


class MemoryHistory:
    """Samples the memory of the host, and judges now and then whether it, or the GPU's, grows.

    A thread of its own calls :meth:`poll`.

    Args:
        gpu: Counts the memory of the GPU, in the thread that trains; ``None`` without one.
        clock: Returns the time in seconds.
        resident_bytes: Returns how much memory of the host this process uses.
        worker_pids: Returns the workers of the training's loader.
        is_validating: Returns whether the training is in validation.

    Attributes:
        alarms: What grows steadily and will be full within a day, each once.
    """

    def __init__(
        self,
        gpu: MemoryCounters | None = None,
        clock: Callable[[], float] = time.monotonic,
        resident_bytes: Callable[[], int] = resident_memory_bytes,
        worker_pids: Callable[[], list[int]] = list,
        is_validating: Callable[[], bool] = lambda: False,
    ) -> None:
        self.alarms: list[MemoryGrowth] = []
        self._gpu = gpu
        self._clock = clock
        self._resident_bytes = resident_bytes
        self._worker_pids = worker_pids
        self._is_validating = is_validating
        self._began_s: float | None = None
        self._alarm_due_s = _FIRST_ALARM_S
        self._workers_due_s = 0.0
        self._resident = Timeline(_MAX_POINTS, _EARLY_INTERVAL_S)
        self._workers = Timeline(_MAX_POINTS, _EARLY_INTERVAL_S)
        self._kept = Timeline(_MAX_POINTS, _EARLY_INTERVAL_S)
        self._last_bytes: int | None = None
        self._grown_bytes: Counter[Literal["training", "validation"]] = Counter()  # of this process

    def poll(self) -> float:
        """Sample how much is used, and return after how many seconds to do so again."""
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s
        resident_bytes = self._resident_bytes()
        self._resident.add(now_s, resident_bytes)
        where: Literal["training", "validation"] = "validation" if self._is_validating() else "training"
        self._grown_bytes[where] += resident_bytes - (self._last_bytes or resident_bytes)
        self._last_bytes = resident_bytes
        if now_s >= self._workers_due_s and (sizes := private_memory_bytes(self._worker_pids())):
            self._workers.add(now_s, sum(sizes))
            # The kernel walks through all their pages for that.
            self._workers_due_s = now_s + _WORKERS_EVERY * (self._clock() - now_s)
        if self._gpu is not None and (kept_bytes := self._gpu.kept_bytes) is not None:
            self._kept.add(now_s, kept_bytes)
        seen_s = now_s - self._began_s
        if seen_s >= self._alarm_due_s:
            self._alarm_due_s = seen_s + min(seen_s, _ALARM_EVERY_S)
            self._judge(seen_s)
        return _EARLY_INTERVAL_S if seen_s < _EARLY_S else _INTERVAL_S

    def _judge(self, seen_s: float) -> None:
        horizon_s = _ALARM_S * min(1.0, seen_s / _ALARM_EVERY_S)
        known = {growth.whose for growth in self.alarms}
        for growth in self.growth():
            if growth.whose not in known and growth.left_s is not None and growth.left_s < horizon_s:
                self.alarms.append(growth)

    def growth(self) -> tuple[MemoryGrowth, ...]:
        """Return what grew steadily up to now."""
        room_bytes = read_host_budget().memory_available_bytes
        process = steady_growth("process", self._resident.points(), room_bytes)
        if process is not None and "validation" in self._grown_bytes:
            ((phase, _),) = self._grown_bytes.most_common(1)
            process = replace(process, phase=phase)
        workers = steady_growth("workers", self._workers.points(), room_bytes)
        gpu = None if self._gpu is None else steady_growth("gpu", self._kept.points(), self._gpu.room_bytes)
        found = (gpu, process, workers)
        return tuple(growth for growth in found if growth is not None)
