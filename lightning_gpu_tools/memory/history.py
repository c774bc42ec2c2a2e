"""The memory of a run's processes and its GPU over time, and alarms when it grows."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from time import monotonic  # by name: a program's tests may replace those of `time`
from typing import get_args

from lightning_gpu_tools.gpus.metrics import Timeline
from lightning_gpu_tools.host import private_memory_bytes, read_host_budget, resident_memory_bytes
from lightning_gpu_tools.memory.counters import MemoryCounters
from lightning_gpu_tools.memory.readings import MemoryGrowth, Whose

# Our defaults.
_MAX_HISTORY_POINTS = 500
_INTERVAL_S = 0.25  # half of what the first alarm requires, because a thread may be late
_WORKERS_EVERY = 100  # limits this to 1% of the thread's time: the kernel walks all pages of the workers' memory
# Memory that has grown for five minutes is reported if it will be full within a day. For shorter growth the limit
# shrinks in proportion: after 12 s, memory is reported if it will be full within an hour.
_ALARM_S = 24 * 3600.0
_ALARM_EVERY_S = 300.0
_FIRST_ALARM_S = 12.0
_PARTS = 8  # of a run, whose medians all have to rise; by chance this happens in 1 of 8! = 40320 runs
_WARM_UP_SHARE = 0.2  # ignored, because caches, workers, and the allocator fill up
_MIN_POINTS_PER_PART = 3
_MIN_GROWTH_BYTES = 64 * 2**20
# Growth that levels off is smaller in the second half: for a square root, by a factor of 0.7.
_MIN_SECOND_HALF = 0.8


class MemoryHistory:
    """A history of host memory, sampled in a separate thread, with regular checks whether it or GPU memory grows."""

    def __init__(self, gpu: MemoryCounters | None = None, worker_pids: Callable[[], list[int]] = list) -> None:
        self.alarms: list[MemoryGrowth] = []  # memory that will be full within a day, each kind once
        self._gpu = gpu
        self._worker_pids = worker_pids
        self._began_s: float | None = None
        self._alarm_due_s = _FIRST_ALARM_S
        self._workers_due_s = 0.0
        self._timelines: dict[Whose, Timeline] = {
            whose: Timeline(_MAX_HISTORY_POINTS, _INTERVAL_S) for whose in get_args(Whose)
        }

    def poll(self) -> float:
        """Sample the memory in use, and return the seconds until the next poll."""
        now_s = monotonic()
        if self._began_s is None:
            self._began_s = now_s
        self._timelines["process"].add(now_s, resident_memory_bytes())
        if now_s >= self._workers_due_s and (sizes := private_memory_bytes(self._worker_pids())):
            self._timelines["workers"].add(now_s, sum(sizes))
            self._workers_due_s = now_s + _WORKERS_EVERY * (monotonic() - now_s)
        if self._gpu is not None and (last := self._gpu.known.last_step) is not None:
            self._timelines["gpu"].add(now_s, last.begin.allocated_bytes)
        seen_s = now_s - self._began_s
        if seen_s >= self._alarm_due_s:
            self._alarm_due_s = seen_s + min(seen_s, _ALARM_EVERY_S)
            horizon_s = _ALARM_S * min(1.0, seen_s / _ALARM_EVERY_S)
            known = {growth.whose for growth in self.alarms}
            for growth in self.growth():
                if growth.whose not in known and growth.left_s is not None and growth.left_s < horizon_s:
                    self.alarms.append(growth)
        return _INTERVAL_S

    def growth(self) -> tuple[MemoryGrowth, ...]:
        """Return the memory that has grown steadily up to now."""
        on_host_bytes = read_host_budget().memory_available_bytes
        on_gpu_bytes = None if self._gpu is None else self._gpu.left_bytes
        found = (
            steady_growth(whose, timeline.points(), on_gpu_bytes if whose == "gpu" else on_host_bytes)
            for whose, timeline in self._timelines.items()
        )
        return tuple(growth for growth in found if growth is not None)


def steady_growth(whose: Whose, points: Sequence[tuple[float, float]], room_bytes: float | None) -> MemoryGrowth | None:
    """Return memory growth from points of (seconds, bytes), oldest first; ``None`` if not steady, or too few points.

    Steady growth lasts to the end. ``room_bytes`` is the free space; ``None`` = unknown.
    """
    if len(points) < _PARTS * _MIN_POINTS_PER_PART:
        return None
    first_s, last_s = points[0][0], points[-1][0]
    begin_s = first_s + _WARM_UP_SHARE * (last_s - first_s)
    part_s = (last_s - begin_s) / _PARTS
    parts: list[list[tuple[float, float]]] = [[] for _ in range(_PARTS)]
    for time_s, size in points:
        if time_s >= begin_s:
            parts[min(int((time_s - begin_s) / part_s), _PARTS - 1)].append((time_s, size))
    if min(map(len, parts)) < _MIN_POINTS_PER_PART:
        return None
    times = [median(time_s for time_s, _ in part) for part in parts]
    sizes = [median(size for _, size in part) for part in parts]
    middle = _PARTS // 2
    first_half, second_half = sizes[middle - 1] - sizes[0], sizes[-1] - sizes[middle]
    rises = all(after > before for before, after in pairwise(sizes))
    if not rises or sizes[-1] - sizes[0] < _MIN_GROWTH_BYTES or second_half < _MIN_SECOND_HALF * first_half:
        return None
    slope = median((sizes[j] - sizes[i]) / (times[j] - times[i]) for i in range(_PARTS) for j in range(i + 1, _PARTS))
    left_s = None if room_bytes is None else max(0.0, room_bytes) / slope
    return MemoryGrowth(whose=whose, bytes_per_s=slope, grown_bytes=sizes[-1] - sizes[0], left_s=left_s)
