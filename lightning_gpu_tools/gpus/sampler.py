"""Background threads that sample GPUs."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import limits
from lightning_gpu_tools.gpus.metrics import GpuSample, GpuWindow
from lightning_gpu_tools.gpus.timeline import Series
from lightning_gpu_tools.gpus.windows import GpuTimelines, Phases, WindowBuilder
from lightning_gpu_tools.units import printable

if TYPE_CHECKING:
    from lightning_gpu_tools.gpus.nvml.probe import GpuProbe

_T = TypeVar("_T")
Phase = Literal["training", "validation"]  # each window covers one of them

_MAX_INTERVAL_S = 10.0  # the driver's buffer holds about 20 s
_TIMELINE_POINTS = 2000  # the width of a screen; about 10 kB per metric in a report


class _Poller(threading.Thread):
    """A thread that polls one GPU, so that a hanging GPU does not delay the others."""

    def __init__(self, run: Callable[[_Poller], None], uuid: str) -> None:
        super().__init__(name="lightning-gpu-tools-sampler", daemon=True)
        self._run = run
        self.uuid = uuid
        self.begun = self.done = self.wanted = 0  # polls
        self.ended = False
        self.failure: Exception | None = None  # the reason why it ended early
        self.busy_since_s: float | None = time.monotonic()  # in the driver
        self.cpu_s = 0.0

    def run(self) -> None:
        self._run(self)

    @property
    def is_late(self) -> bool:
        since_s = self.busy_since_s  # read once, because the thread may change it
        limit_s = limits.LIMIT_S if self.begun else limits.OPENING_LIMIT_S
        return since_s is not None and time.monotonic() - since_s > limit_s

    @property
    def has_no_samples(self) -> bool:
        return self.is_late or self.failure is not None

    def problem(self) -> str:
        """Return the reason why there are no samples now."""
        if self.failure is not None:
            error = printable(repr(self.failure), 200)
            return f"{self.uuid} is no longer measured after an unexpected error: {error}."
        function = limits.pending_function(self)
        late = f"The driver has not answered {function} for {self.uuid} within {limits.LIMIT_S:.0f} s"
        return f"{late}. This GPU is not measured until it answers. Check `dmesg`."


class Sampler:
    """Threads that sample GPUs and MIG instances until they are closed, and aggregate the samples.

    The constructor raises ``NvmlUnavailableError`` without a usable NVIDIA driver. If reading a GPU fails later, or the
    driver does not answer for it, its windows report that as a problem, and the other GPUs are still sampled. In a
    forked child, which has no such threads, the sampler is empty. ``gpm`` is whether to use the GPU performance
    monitors.
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
        self._latest: dict[str, GpuSample] = {}
        self.refused: dict[str, None] = {}  # descriptions of counters that the driver refuses
        self._stopping = False
        lock = threading.Lock()  # guards everything that the threads collect
        self._polled, self._wake = threading.Condition(lock), threading.Condition(lock)
        self._pollers = [_Poller(self._run, uuid) for uuid in uuids]
        for poller in self._pollers:
            poller.start()
        with self._polled:
            self._polled.wait_for(lambda: all(poller.begun or poller.ended for poller in self._pollers), limits.LIMIT_S)
            unusable = [poller.failure for poller in self._pollers if isinstance(poller.failure, NvmlUnavailableError)]
            if unusable:
                self._stop()
                raise unusable[0]

    @property
    def cpu_s(self) -> float:
        """CPU time of the threads."""
        return sum(poller.cpu_s for poller in self._pollers)

    @property
    def polled(self) -> tuple[int, frozenset[str]]:
        """The smallest number of polls among the GPUs that answer, and the UUIDs of those that do not."""
        late = frozenset(poller.uuid for poller in self._pollers if poller.has_no_samples)
        return min((poller.done for poller in self._pollers if poller.uuid not in late), default=0), late

    def enter(self, phase: Phase) -> None:
        """Assign samples to this phase from now on. The first phase is training."""
        self._collected(lambda: self._phases.enter(phase, time.time()), None)

    def take(self, phase: Phase = "training") -> dict[str, GpuWindow]:
        """Return the windows of a phase since the last call for it, by UUID. Windows of both phases have the errors."""
        return self._read(self._recent[phase], WindowBuilder.take)

    def whole(self, phase: Phase = "training", *, wait_s: float = 0.0) -> dict[str, GpuWindow]:
        """Return the windows of a phase so far, by UUID, after one more poll if it ends within ``wait_s``."""
        return self._read(self._whole[phase], WindowBuilder.so_far, wait_s)

    def latest(self) -> dict[str, GpuSample]:
        """Return the last sample of each GPU, by UUID."""
        return self._collected(lambda: dict(self._latest), {})

    def timelines(self, uuid: str) -> dict[str, Series]:
        """Return the timelines of a GPU over the whole run."""
        return self._collected(lambda: self._timelines[uuid].series(), {})

    def close(self) -> None:
        """End the threads. Collected data can still be taken."""
        if self._pid == os.getpid():
            with self._polled:
                self._stop()
            until_s = time.monotonic() + limits.LIMIT_S
            for poller in self._pollers:
                poller.join(0 if poller.is_late else max(0.0, until_s - time.monotonic()))

    def _collected(self, read: Callable[[], _T], in_child: _T) -> _T:
        """Call a function with the lock; return ``in_child`` in a forked child, where a thread may hold it forever."""
        if self._pid != os.getpid():
            return in_child
        with self._polled:
            return read()

    def _stop(self) -> None:
        self._stopping = True
        self._wake.notify_all()

    def _read(
        self, windows: dict[str, WindowBuilder], read: Callable[[WindowBuilder], GpuWindow], wait_s: float = 0.0
    ) -> dict[str, GpuWindow]:
        if self._pid != os.getpid():  # the parent's threads may hold the lock forever
            return {}
        with self._polled:
            if wait_s > 0:
                for poller in self._pollers:
                    poller.wanted = poller.begun + 1
                self._wake.notify_all()
                self._polled.wait_for(
                    lambda: all(
                        poller.done >= poller.wanted or poller.ended or poller.is_late for poller in self._pollers
                    ),
                    min(wait_s, limits.LIMIT_S),  # there is no notification if a poll becomes late
                )
            found = {uuid: read(window) for uuid, window in windows.items()}
        for poller in self._pollers:
            if poller.has_no_samples:
                window = found[poller.uuid]
                found[poller.uuid] = dataclasses.replace(window, problems=(*window.problems, poller.problem()))
        return found

    def _run(self, poller: _Poller) -> None:
        probe: GpuProbe | None = None
        try:
            from lightning_gpu_tools.gpus.nvml.probe import GpuProbe  # only now: it imports pynvml

            probe = GpuProbe(poller.uuid, gpm=self._gpm)
            while not self._stopping:
                self._poll(poller, probe)  # the first sample is the baseline of the counters
                with self._wake:
                    self._wake.wait_for(lambda: self._stopping or poller.done < poller.wanted, self._interval_s)
        except Exception as error:  # noqa: BLE001 - training continues after any error
            poller.failure = error
        finally:
            if probe is not None:
                probe.close()
            with self._polled:
                poller.ended = True
                poller.busy_since_s = None
                self._polled.notify_all()

    def _poll(self, poller: _Poller, probe: GpuProbe) -> None:
        with self._polled:
            poller.begun += 1
            poller.busy_since_s = time.monotonic()
            self._polled.notify_all()
        sample = probe.read()  # without the lock: this takes time
        with self._polled:
            for windows in (*self._recent.values(), *self._whole.values()):
                windows[sample.uuid].add(sample)
            self._timelines[sample.uuid].add(sample)
            self._latest[sample.uuid] = sample
            self.refused = {**self.refused, **dict.fromkeys(sample.refused)}  # a new one: it is read without the lock
            poller.done += 1
            poller.busy_since_s = None
            poller.cpu_s = time.thread_time()
            self._polled.notify_all()
