"""A background thread that samples GPUs.

The driver buffers its utilization samples for some seconds, so polling once a second misses none of them. All that
happens in the training thread is ``Sampler.take``, which adds up numbers and asks no driver.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus.metrics import GpuSample, GpuWindow
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.gpus.utilization import mean_percent
from lightning_gpu_tools.gpus.window import GpuTimelines, Phases, WindowBuilder
from lightning_gpu_tools.training.timeline import Series

if TYPE_CHECKING:
    from lightning_gpu_tools.gpus.nvml.probe import GpuProbe

# A window is taken of one of these.
Phase = Literal["training", "validation"]

# The driver's buffer holds about 20 s; poll at least this often, so that nothing in it is overwritten unseen.
_MAX_INTERVAL_S = 10.0

# Enough for a chart as wide as a screen; about 10 kB of a report for each metric.
_TIMELINE_POINTS = 2000

# How long to wait for a poll that hangs in the driver, as it does with a GPU that is falling off the bus.
_TIMEOUT_S = 5.0

# Without persistence mode the driver wakes each GPU up when it is opened, which takes seconds a GPU.
_OPENING_TIMEOUT_S = 60.0

_THREAD_NAME = "lightning-gpu-tools-sampler"


class Sampler:
    """Samples GPUs and MIG instances in a thread of its own until it is closed, and adds up what it sees.

    Making one raises ``NvmlUnavailableError`` without a usable NVIDIA driver. Later the thread never raises: if it has
    to stop, ``failure`` says why, and what was seen before can still be taken. In a forked child, where there is no
    thread, a sampler is empty. ``gpm`` says whether the GPU performance monitors may be used.
    """

    def __init__(
        self,
        uuids: Sequence[str],
        *,
        interval_s: float = 1.0,
        gpm: bool = True,
        open_probe: Callable[..., GpuProbe] | None = None,
    ) -> None:
        self._interval_s = min(interval_s, _MAX_INTERVAL_S)
        self._gpm = gpm
        self._open_probe = open_probe
        self._pid = os.getpid()
        self._phases = Phases("training")
        # What has not been taken yet, and the whole time so far.
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
        self._opened = threading.Event()
        self._wake = threading.Event()
        self._stopping = self._ended = False
        self._polled = threading.Condition()  # guards all that the thread collects
        self._polls_begun = self._polls_done = 0
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)
        self._thread.start()
        self._opened.wait(_OPENING_TIMEOUT_S)
        if isinstance(self.failure, NvmlUnavailableError):
            raise self.failure

    @property
    def latest_percent(self) -> float | None:
        """Utilization between the last two polls, the mean of the GPUs; ``None`` if nothing reports it."""
        values = list(self._latest_percent.values())
        return fmean(values) if values else None

    def enter(self, phase: Phase) -> None:
        """Count what the GPUs do from now on to this phase; it begins with training."""
        if self._pid == os.getpid():
            with self._polled:
                self._phases.enter(phase, time.time())

    def take(self, *, wait_s: float = 0.0, phase: Phase = "training") -> dict[str, GpuWindow]:
        """Return what happened in a phase since the last such call, by UUID; errors are in the windows of both.

        With ``wait_s`` the thread polls once more, which is waited for at most so long: for the end of a run.
        """
        return self._read(self._recent[phase], WindowBuilder.take, wait_s)

    def whole(self, *, wait_s: float = 0.0, phase: Phase = "training") -> dict[str, GpuWindow]:
        """Return what happened in a phase so far, whatever has been taken meanwhile, by UUID."""
        return self._read(self._whole[phase], WindowBuilder.so_far, wait_s)

    def latest_listed(self) -> dict[str, GpuSample]:
        """Return the last sample of each GPU that lists the memory of its processes, by UUID."""
        if self._pid != os.getpid():
            return {}
        with self._polled:
            return dict(self._latest_listed)

    def timelines(self, uuid: str) -> dict[str, Series]:
        """Return over the whole time what ``GpuTimelines`` keeps, in at most 2000 points."""
        if self._pid != os.getpid():
            return {}
        with self._polled:
            return self._timelines[uuid].series()

    def close(self) -> None:
        """End the thread; what was collected can still be taken. Idempotent."""
        if self._pid == os.getpid():
            self._stopping = True
            self._wake.set()
            self._thread.join(_TIMEOUT_S)  # it may hang in the driver, and then it is left behind

    def _read(
        self, windows: dict[str, WindowBuilder], read: Callable[[WindowBuilder], GpuWindow], wait_s: float
    ) -> dict[str, GpuWindow]:
        if self._pid != os.getpid():  # the thread is the parent's, and it may hold the lock for ever
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
                probe = (self._open_probe or GpuProbe)(uuid, gpm=self._gpm)
                probes.append(probe)  # one by one: those that were opened are closed in any case
            self._opened.set()
            while not self._stopping:
                self._poll(probes)  # the first sample gives the counters their start
                self._wake.wait(self._interval_s)
                self._wake.clear()
        except Exception as error:  # noqa: BLE001 - whatever it was, training goes on
            self.failure = error
        finally:
            for probe in probes:
                probe.close()
            self._opened.set()
            with self._polled:
                self._ended = True
                self._polled.notify_all()

    def _poll(self, probes: Sequence[GpuProbe]) -> None:
        with self._polled:
            self._polls_begun += 1
        samples = [probe.read() for probe in probes]  # this takes time, and the lock is free meanwhile
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
    """Read every GPU as ``nvml.read_gpus`` does, in a thread; ``NvmlUnavailableError`` also if no answer comes."""
    found: list[tuple[GpuReading, ...] | Exception] = []

    def read() -> None:
        from lightning_gpu_tools.gpus import nvml  # imports pynvml

        try:
            found.append(nvml.read_gpus())
        except NvmlUnavailableError as error:
            found.append(error)

    thread = threading.Thread(target=read, name=_THREAD_NAME, daemon=True)
    thread.start()
    thread.join(_OPENING_TIMEOUT_S)
    if not found:
        raise NvmlUnavailableError(f"The NVIDIA driver did not answer within {_OPENING_TIMEOUT_S:.0f} s: see `dmesg`.")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
