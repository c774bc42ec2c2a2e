"""A background thread that samples GPUs, and what its samples say of the time between two moments."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus.metrics import METRICS, GpuSample, GpuWindow, Metric
from lightning_gpu_tools.gpus.readings import LONGEST_PERIOD_S, GpuProcess, GpuReading, mean_percent, weights_s
from lightning_gpu_tools.training.timeline import Series, Timeline

if TYPE_CHECKING:
    from lightning_gpu_tools.gpus.nvml.probe import GpuProbe

_TIMELINES = ("memory_used_bytes", "power_watts")  # besides utilization
# The metrics made of a GPU's state at a sample, and those made of counters.
_OF_STATE = [metric for metric in METRICS if metric.reduction in ("mean", "max") and metric.source != "utilization"]
_COUNTERS = sorted({m.source for m in METRICS if m.reduction in ("difference", "rate", "percent_of_time")})

# In one window:
_MAX_TEXTS = 100
_MAX_SUMS = 256


class PercentHistogram:
    """How long a percentage had which value; the driver gives whole percents."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._seconds = [0.0] * 101
        self._percent_seconds = 0.0

    def add(self, percent: float, seconds: float) -> None:
        """Add an observation."""
        self._seconds[round(min(max(percent, 0.0), 100.0))] += seconds
        self.total_s += seconds
        self._percent_seconds += percent * seconds

    def mean(self) -> float | None:
        """Return the mean over the time."""
        return self._percent_seconds / self.total_s if self.total_s > 0 else None

    def percentile(self, share: float) -> float | None:
        """Return the lowest value that was not exceeded for this share (0 to 1) of the time."""
        # Rounding in the sum must not push a percentile beyond the last value.
        below_s, wanted_s, value = 0.0, share * self.total_s * (1 - 1e-9), None
        for percent, seconds in enumerate(self._seconds):
            if seconds > 0:
                below_s, value = below_s + seconds, float(percent)
                if below_s >= wanted_s:
                    break
        return value


class Phases:
    """When a run was in which phase, as far back as a sample can reach; at first in training."""

    def __init__(self) -> None:
        self._since: deque[tuple[float, str]] = deque([(-math.inf, "training")], maxlen=1000)

    def enter(self, phase: str, time_s: float) -> None:
        """Be in this phase from ``time_s`` on."""
        self._since.append((time_s, phase))

    def overlap_s(self, phase: str, begin_s: float, end_s: float) -> float:
        """Return how much of the time from ``begin_s`` to ``end_s`` the run was in this phase."""
        total_s, until_s = 0.0, end_s
        for since_s, name in reversed(self._since):
            if name == phase:
                total_s += max(0.0, until_s - max(since_s, begin_s))
            until_s = min(until_s, since_s)
            if since_s <= begin_s:
                break
        return total_s


class WindowBuilder:
    """Adds up the samples of one GPU until they are taken.

    ``overlap_s`` says how much of the time between two moments counts; counters count in proportion.
    """

    def __init__(self, uuid: str, overlap_s: Callable[[float, float], float]) -> None:
        self._uuid = uuid
        self._overlap_s = overlap_s
        # Kept from one window to the next:
        self._sample_s: float | None = None
        self._utilization_s: float | None = None
        self._counters: dict[str, tuple[float, float]] = {}  # time and value
        self._begin()

    def _begin(self) -> None:
        self._last: GpuSample | None = None
        self._utilization = PercentHistogram()
        self._maxima: dict[str, float] = {}
        # A quantity times seconds, or the difference of a counter, and the seconds; by field, and by process.
        self._sums: dict[str | int, tuple[float, float]] = {}
        self._errors: dict[str, None] = {}
        self._problems: dict[str, None] = {}

    def add(self, sample: GpuSample) -> None:
        """Add the next sample."""
        for entry, seconds in zip(sample.utilization, weights_s(sample.utilization, self._utilization_s), strict=True):
            counted_s = self._overlap_s(entry.time_s - seconds, entry.time_s)
            if counted_s > 0:
                self._utilization.add(entry.percent, counted_s)
            self._utilization_s = entry.time_s
        before_s, self._sample_s = self._sample_s, sample.time_s
        begin_s = sample.time_s - LONGEST_PERIOD_S if before_s is None else min(before_s, sample.time_s)
        counted_s = self._overlap_s(begin_s, sample.time_s)
        share = counted_s / (sample.time_s - begin_s) if sample.time_s > begin_s else 1.0
        self._add_counters(sample, share)
        for texts, new in ((self._errors, sample.errors), (self._problems, sample.problems)):
            texts.update(dict.fromkeys(new[: _MAX_TEXTS - len(texts)]))
        if share <= 0:
            return
        for metric in _OF_STATE:
            value = getattr(sample, metric.source)
            if value is not None and metric.reduction == "max":
                self._maxima[metric.source] = max(value, self._maxima.get(metric.source, value))
            elif value is not None:
                self._sum_up(metric.source, value * counted_s, counted_s)
        for process in sample.processes or ():
            if process.utilization_percent is not None and len(self._sums) < _MAX_SUMS:
                self._sum_up(process.pid, process.utilization_percent * counted_s, counted_s)
        self._last = sample

    def _add_counters(self, sample: GpuSample, share: float) -> None:
        for name in _COUNTERS:
            value = getattr(sample, name)
            if value is None:
                continue
            before = self._counters.get(name)
            self._counters[name] = sample.time_s, value
            # A counter that was set back (a reset, a new driver) starts again.
            if before is not None and value >= before[1] and share > 0:
                self._sum_up(name, share * (value - before[1]), share * (sample.time_s - before[0]))

    def _sum_up(self, key: str | int, amount: float, seconds: float) -> None:
        total, total_s = self._sums.get(key, (0.0, 0.0))
        self._sums[key] = total + amount, total_s + seconds

    def take(self) -> GpuWindow:
        """Return everything since the last call, and begin a new window."""
        window = self.so_far()
        self._begin()
        return window

    def so_far(self) -> GpuWindow:
        """Return everything since the last ``take``, and go on."""
        last = self._last or GpuSample(uuid=self._uuid, time_s=0.0)
        metrics: dict[str, Any] = {metric.field: self._reduced(metric, last) for metric in METRICS}
        return GpuWindow(
            uuid=self._uuid,
            utilization_observed_s=self._utilization.total_s,
            processes=None if last.processes is None else tuple(self._with_mean(one) for one in last.processes),
            errors=tuple(self._errors),
            problems=tuple(self._problems),
            **metrics,
        )

    def _reduced(self, metric: Metric, last: GpuSample) -> float | None:
        source, reduction = metric.source, metric.reduction
        if source == "utilization":
            utilization = self._utilization
            return utilization.mean() if reduction == "mean" else utilization.percentile(int(reduction[1:]) / 100)
        if reduction == "last":
            return getattr(last, source)  # type: ignore[no-any-return]
        if reduction == "max":
            return self._maxima.get(source)
        total, seconds = self._sums.get(source, (None, 0.0))
        if total is None or reduction == "difference":
            return total
        if seconds <= 0:
            return None
        # Power and heat may hold the clocks down at once, and these counters move in steps of 0.1 s.
        return min(100.0 * total / seconds, 100.0) if reduction == "percent_of_time" else total / seconds

    def _with_mean(self, process: GpuProcess) -> GpuProcess:
        total, seconds = self._sums.get(process.pid, (0.0, 0.0))
        return dataclasses.replace(process, utilization_percent=total / seconds if seconds > 0 else None)


class GpuTimelines:
    """The timelines of one GPU, by field of ``GpuSample`` and as ``utilization_percent``."""

    def __init__(self, max_points: int, width_s: float) -> None:
        self._timelines = {name: Timeline(max_points, width_s) for name in ("utilization_percent", *_TIMELINES)}

    def add(self, sample: GpuSample) -> None:
        """Add the next sample."""
        for entry, seconds in zip(sample.utilization, weights_s(sample.utilization), strict=True):
            self._timelines["utilization_percent"].add(entry.time_s, entry.percent, seconds)
        for name in _TIMELINES:
            value = getattr(sample, name)
            if value is not None:
                self._timelines[name].add(sample.time_s, value)

    def series(self) -> dict[str, Series]:
        """Return every metric that was reported, in seconds since the epoch."""
        return {name: series for name, timeline in self._timelines.items() if (series := timeline.series()).values}


# A window is taken of one of these.
Phase = Literal["training", "validation"]

_MAX_INTERVAL_S = 10.0  # the driver's buffer holds about 20 s
_TIMELINE_POINTS = 2000  # as wide as a screen; about 10 kB of a report for each metric
_TIMEOUT_S = 5.0  # a poll hangs in the driver when a GPU is falling off the bus
_OPENING_TIMEOUT_S = 60.0  # without persistence mode the driver wakes each GPU up, which takes seconds

_THREAD_NAME = "lightning-gpu-tools-sampler"


class Sampler:
    """Samples GPUs and MIG instances in a thread until it is closed, and adds up what it sees.

    Making one raises ``NvmlUnavailableError`` without a usable NVIDIA driver. If the thread has to stop later,
    ``failure`` says why, and what was seen before can still be taken. In a forked child, which has no thread, it is
    empty. ``gpm``: whether to use the GPU performance monitors.
    """

    def __init__(self, uuids: Sequence[str], *, interval_s: float = 1.0, gpm: bool = True) -> None:
        self._interval_s = min(interval_s, _MAX_INTERVAL_S)
        self._gpm = gpm
        self._pid = os.getpid()
        self._phases = Phases()
        # Since the last `take`, and over the whole time.
        self._recent, self._whole = (
            {
                phase: {uuid: WindowBuilder(uuid, functools.partial(self._phases.overlap_s, phase)) for uuid in uuids}
                for phase in ("training", "validation")
            }
            for _ in range(2)
        )
        self._timelines = {uuid: GpuTimelines(_TIMELINE_POINTS, interval_s) for uuid in uuids}
        self._latest_percent: dict[str, float] = {}
        self._latest_listed: dict[str, GpuSample] = {}
        self.failure: Exception | None = None
        self.cpu_s = 0.0  # of the thread
        self._wake = threading.Event()
        self._stopping = self._ended = False
        self._polled = threading.Condition()  # guards all that the thread collects
        self._polls_begun = self._polls_done = 0
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)
        self._thread.start()
        with self._polled:
            self._polled.wait_for(lambda: self._polls_begun or self._ended, _OPENING_TIMEOUT_S)
        if isinstance(self.failure, NvmlUnavailableError):
            raise self.failure

    @property
    def latest_percent(self) -> float | None:
        """Utilization between the last two polls, the mean of the GPUs."""
        values = list(self._latest_percent.values())
        return fmean(values) if values else None

    def enter(self, phase: Phase) -> None:
        """Count what the GPUs do from now on to this phase; it begins with training."""
        if self._pid == os.getpid():
            with self._polled:
                self._phases.enter(phase, time.time())

    def take(self, phase: Phase = "training") -> dict[str, GpuWindow]:
        """Return what happened in a phase since the last such call, by UUID; errors are in the windows of both."""
        return self._read(self._recent[phase], WindowBuilder.take)

    def whole(self, phase: Phase = "training", *, wait_s: float = 0.0) -> dict[str, GpuWindow]:
        """Return what happened in a phase so far, by UUID, after one more poll that comes within ``wait_s``."""
        return self._read(self._whole[phase], WindowBuilder.so_far, wait_s)

    def latest_listed(self) -> dict[str, GpuSample]:
        """Return the last sample of each GPU that lists its processes, by UUID."""
        if self._pid != os.getpid():
            return {}
        with self._polled:
            return dict(self._latest_listed)

    def timelines(self, uuid: str) -> dict[str, Series]:
        """Return the timelines of a GPU over the whole time."""
        if self._pid != os.getpid():
            return {}
        with self._polled:
            return self._timelines[uuid].series()

    def close(self) -> None:
        """End the thread; what was collected can still be taken."""
        if self._pid == os.getpid():
            self._stopping = True
            self._wake.set()
            self._thread.join(_TIMEOUT_S)

    def _read(
        self, windows: dict[str, WindowBuilder], read: Callable[[WindowBuilder], GpuWindow], wait_s: float = 0.0
    ) -> dict[str, GpuWindow]:
        if self._pid != os.getpid():  # the parent's thread may hold the lock for ever
            return {}
        with self._polled:
            if wait_s > 0:
                wanted = self._polls_begun + 1
                self._wake.set()
                self._polled.wait_for(lambda: self._polls_done >= wanted or self._ended, wait_s)
            return {uuid: read(window) for uuid, window in windows.items()}

    def _run(self) -> None:
        probes: list[GpuProbe] = []
        try:
            from lightning_gpu_tools.gpus.nvml.probe import GpuProbe  # only now: it imports pynvml

            for uuid in self._timelines:
                probes.append(GpuProbe(uuid, gpm=self._gpm))  # noqa: PERF401 - what was opened is closed in any case
            while not self._stopping:
                self._poll(probes)  # the first sample gives the counters their start
                self._wake.wait(self._interval_s)
                self._wake.clear()
        except Exception as error:  # noqa: BLE001 - whatever it was, training goes on
            self.failure = error
        finally:
            for probe in probes:
                probe.close()
            with self._polled:
                self._ended = True
                self._polled.notify_all()

    def _poll(self, probes: Sequence[GpuProbe]) -> None:
        with self._polled:
            self._polls_begun += 1
            self._polled.notify_all()
        samples = [probe.read() for probe in probes]  # without the lock: this takes time
        with self._polled:
            for sample in samples:
                for windows in (*self._recent.values(), *self._whole.values()):
                    windows[sample.uuid].add(sample)
                self._timelines[sample.uuid].add(sample)
                if sample.lists_processes:
                    self._latest_listed[sample.uuid] = sample
                percent = mean_percent(sample.utilization)
                if percent is not None:
                    self._latest_percent[sample.uuid] = percent
            self._polls_done += 1
            self.cpu_s = time.thread_time()
            self._polled.notify_all()


def read_gpus() -> tuple[GpuReading, ...]:
    """Call ``nvml.read_gpus`` in a thread; ``NvmlUnavailableError`` also if it does not answer."""
    answer: Future[tuple[GpuReading, ...]] = Future()

    def read() -> None:
        from lightning_gpu_tools.gpus import nvml  # imports pynvml

        try:
            answer.set_result(nvml.read_gpus())
        except Exception as error:  # noqa: BLE001 - raised below
            answer.set_exception(error)

    threading.Thread(target=read, name=_THREAD_NAME, daemon=True).start()
    try:
        return answer.result(_OPENING_TIMEOUT_S)
    except TimeoutError:
        late = f"The NVIDIA driver did not answer within {_OPENING_TIMEOUT_S:.0f} s: see `dmesg`."
        raise NvmlUnavailableError(late) from None
