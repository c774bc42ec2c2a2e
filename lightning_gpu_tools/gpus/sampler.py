"""A background thread that samples GPUs."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus.metrics import GpuSample, GpuWindow
from lightning_gpu_tools.gpus.readings import GpuReading, mean_percent
from lightning_gpu_tools.gpus.windows import GpuTimelines, Phases, WindowBuilder
from lightning_gpu_tools.training.timeline import Series

if TYPE_CHECKING:
    from lightning_gpu_tools.gpus.nvml.probe import GpuProbe

# Each window covers one of these.
Phase = Literal["training", "validation"]

_MAX_INTERVAL_S = 10.0  # the driver's buffer holds about 20 s
_TIMELINE_POINTS = 2000  # the width of a screen; about 10 kB per metric in a report
_TIMEOUT_S = 5.0  # a poll hangs in the driver while a GPU is falling off the bus
_OPENING_TIMEOUT_S = 60.0  # without persistence mode the driver wakes up each GPU, which takes seconds

_THREAD_NAME = "lightning-gpu-tools-sampler"


class Sampler:
    """A thread that samples GPUs and MIG instances until it is closed, and aggregates the samples.

    Creating it raises ``NvmlUnavailableError`` without a usable NVIDIA driver. If the thread has to stop later,
    ``failure`` holds the error, and earlier samples can still be taken. In a forked child, which has no such thread, it
    is empty. ``gpm``: whether to use the GPU performance monitors.
    """

    def __init__(self, uuids: Sequence[str], *, interval_s: float = 1.0, gpm: bool = True) -> None:
        self._interval_s = min(interval_s, _MAX_INTERVAL_S)
        self._gpm = gpm
        self._pid = os.getpid()
        self._phases = Phases()
        # Since the last `take`, and over the whole run.
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
        self.cpu_s = 0.0  # CPU time of the thread
        self._wake = threading.Event()
        self._stopping = self._ended = False
        self._polled = threading.Condition()  # guards everything that the thread collects
        self._polls_begun = self._polls_done = 0
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)
        self._thread.start()
        with self._polled:
            self._polled.wait_for(lambda: self._polls_begun or self._ended, _OPENING_TIMEOUT_S)
        if isinstance(self.failure, NvmlUnavailableError):
            raise self.failure

    @property
    def latest_percent(self) -> float | None:
        """Utilization between the last two polls, as the mean over the GPUs."""
        values = list(self._latest_percent.values())
        return fmean(values) if values else None

    def enter(self, phase: Phase) -> None:
        """Assign samples to this phase from now on. The first phase is training."""
        if self._pid == os.getpid():
            with self._polled:
                self._phases.enter(phase, time.time())

    def take(self, phase: Phase = "training") -> dict[str, GpuWindow]:
        """Return the windows of a phase since the last such call, by UUID. Errors are in the windows of both phases."""
        return self._read(self._recent[phase], WindowBuilder.take)

    def whole(self, phase: Phase = "training", *, wait_s: float = 0.0) -> dict[str, GpuWindow]:
        """Return the windows of a phase so far, by UUID, after one more poll if it ends within ``wait_s``."""
        return self._read(self._whole[phase], WindowBuilder.so_far, wait_s)

    def latest_listed(self) -> dict[str, GpuSample]:
        """Return the last sample of each GPU that includes the process list, by UUID."""
        if self._pid != os.getpid():
            return {}
        with self._polled:
            return dict(self._latest_listed)

    def timelines(self, uuid: str) -> dict[str, Series]:
        """Return the timelines of a GPU over the whole run."""
        if self._pid != os.getpid():
            return {}
        with self._polled:
            return self._timelines[uuid].series()

    def close(self) -> None:
        """End the thread. Collected data can still be taken."""
        if self._pid == os.getpid():
            self._stopping = True
            self._wake.set()
            self._thread.join(_TIMEOUT_S)

    def _read(
        self, windows: dict[str, WindowBuilder], read: Callable[[WindowBuilder], GpuWindow], wait_s: float = 0.0
    ) -> dict[str, GpuWindow]:
        if self._pid != os.getpid():  # the parent's thread may hold the lock forever
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
                probes.append(GpuProbe(uuid, gpm=self._gpm))  # noqa: PERF401 - opened probes are closed in any case
            while not self._stopping:
                self._poll(probes)  # the first sample is the baseline of the counters
                self._wake.wait(self._interval_s)
                self._wake.clear()
        except Exception as error:  # noqa: BLE001 - training continues after any error
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
    """Call ``nvml.read_gpus`` in a thread; raise ``NvmlUnavailableError`` also on a timeout."""
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
