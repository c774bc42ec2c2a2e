"""The background thread that samples the GPUs: one for each process, however many want to know.

The driver buffers its utilization samples for some seconds, so polling once a second misses none of them. All that
happens in the training thread is ``Reader.take``, which adds up numbers and asks no driver.

    with subscribe([uuid], interval_s=1.0) as reader:
        ...
        window = reader.take()[uuid]
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus.metrics import GpuWindow
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.gpus.samples import GpuSample
from lightning_gpu_tools.gpus.utilization import mean_percent
from lightning_gpu_tools.gpus.window import GpuTimelines, Phases, WindowBuilder

# A window is taken of one of these.
Phase = Literal["training", "validation"]

# The driver's buffer holds about 20 s; poll at least this often, so that nothing in it is overwritten unseen.
_MAX_INTERVAL_S = 10.0

# Enough for a chart as wide as a screen; about 100 kB a metric.
_TIMELINE_POINTS = 2000

# How long to wait for a poll that hangs in the driver, as it does with a GPU that is falling off the bus.
_TIMEOUT_S = 5.0

# Without persistence mode the driver wakes each GPU up when it is opened, which takes seconds a GPU.
_OPENING_TIMEOUT_S = 60.0


class Probe(Protocol):
    """What the thread reads: ``nvml.probe.GpuProbe``."""

    def read(self) -> GpuSample:
        """Return what happened since the last call."""

    def close(self) -> None:
        """Give everything back."""


def _open_probe(uuid: str, gpm: bool) -> Probe:
    from lightning_gpu_tools.gpus.nvml.probe import GpuProbe  # only now: importing it imports pynvml

    return GpuProbe(uuid, gpm=gpm)


class Sampler:
    """One thread that samples some GPUs every so often. Use ``subscribe``, which shares it.

    The thread runs while there is a reader. It never raises: if it has to stop, ``failure`` says why.

    Args:
        open_probe: Gives what reads one GPU, by its UUID and whether GPM may be used. The thread calls it.

    Attributes:
        failure: Why the thread had to stop, ``None`` if it did not.
        cpu_s: CPU time of the thread so far.
    """

    def __init__(self, open_probe: Callable[[str, bool], Probe] = _open_probe) -> None:
        self._open_probe = open_probe
        self._probes: dict[str, tuple[Probe, bool]] = {}  # only the thread touches them; with whether they use GPM
        self._unavailable: dict[str, NvmlUnavailableError] = {}
        self.cpu_s = 0.0
        self._readers: list[Reader] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._changed = threading.Condition()  # guards what follows, and what the readers have collected
        self._stopping = False
        self._polls_begun = 0
        self._polls_done = 0
        self.failure: Exception | None = None

    @property
    def running(self) -> bool:
        """Whether there is a thread that another reader can use."""
        return self._thread is not None and not self._stopping and self.failure is None

    def subscribe(self, uuids: Sequence[str], interval_s: float = 1.0, gpm: bool = True) -> Reader:
        """Sample these GPUs, too; see ``subscribe`` of this module."""
        if not interval_s > 0:
            raise ValueError(f"interval_s must be positive, got {interval_s!r}.")
        reader = Reader(self, uuids, interval_s, gpm)
        with self._changed:
            for uuid in uuids:  # one more try
                self._unavailable.pop(uuid, None)
            self._readers.append(reader)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)
                self._thread.start()
            self._wake.set()  # the first sample gives the counters their start
            self._changed.wait_for(
                lambda: self.failure is not None or {*uuids} <= {*self._probes, *self._unavailable},
                _OPENING_TIMEOUT_S,
            )
            unavailable = next((self._unavailable[uuid] for uuid in uuids if uuid in self._unavailable), None)
        if unavailable is not None:
            self.unsubscribe(reader)
            raise unavailable
        return reader

    def unsubscribe(self, reader: Reader) -> None:
        """Stop working for a reader; with the last one the thread ends."""
        with self._changed:
            if reader not in self._readers:
                return
            self._readers.remove(reader)
            self._stopping = not self._readers
        if not self._stopping or self._thread is None:
            return
        self._wake.set()
        self._thread.join(_TIMEOUT_S)  # it may hang in the driver, and then it is left behind

    def poll_now(self, timeout_s: float) -> bool:
        """Have the thread poll at once and wait for it; ``False`` if that did not come to an end in time."""
        with self._changed:
            wanted = self._polls_begun + 1
            self._wake.set()
            self._changed.wait_for(lambda: self._polls_done >= wanted or not self.running, timeout_s)
            return self._polls_done >= wanted

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    interval_s = min([_MAX_INTERVAL_S, *(reader.interval_s for reader in self._readers)])
                self._wake.wait(interval_s)
                self._wake.clear()
                if self._stopping:
                    return
                self._poll()
        # The top of a thread is the one place for this: whatever it was, training goes on, and `failure` reports it.
        except Exception as error:  # noqa: BLE001
            with self._changed:
                self.failure = error
                self._changed.notify_all()
        finally:
            for probe, _ in self._probes.values():
                probe.close()

    def _poll(self) -> None:
        with self._changed:
            self._polls_begun += 1
            readers = list(self._readers)
        # What follows takes time, and the lock is free meanwhile.
        self._open_and_close(
            {uuid: all(r.gpm for r in readers if uuid in r.uuids) for r in readers for uuid in r.uuids}
        )
        with self._changed:
            self._changed.notify_all()  # who subscribes waits for the opening, not for the first sample
        samples = [probe.read() for probe, _ in list(self._probes.values())]
        with self._changed:
            for reader in self._readers:
                for sample in samples:
                    reader._add(sample)
            self._polls_done += 1
            self.cpu_s = time.thread_time()
            self._changed.notify_all()

    def _open_and_close(self, wanted: dict[str, bool]) -> None:
        """Have a probe of each GPU that a reader wants, with GPM unless a reader wants it left alone."""
        for uuid, (probe, gpm) in list(self._probes.items()):
            if wanted.get(uuid) is not gpm:
                del self._probes[uuid]
                probe.close()
        for uuid, gpm in wanted.items():
            if uuid in self._probes or uuid in self._unavailable:
                continue
            try:
                self._probes[uuid] = self._open_probe(uuid, gpm), gpm
            except NvmlUnavailableError as error:  # `subscribe` waits for this and raises it
                self._unavailable[uuid] = error


class Reader:
    """What one user of a sampler has not yet taken. Safe to leave behind in a forked child, where it is empty."""

    def __init__(self, sampler: Sampler, uuids: Sequence[str], interval_s: float, gpm: bool) -> None:
        self.uuids = frozenset(uuids)
        self.interval_s = interval_s
        self.gpm = gpm
        self._sampler = sampler
        self._pid = os.getpid()
        self._phases = Phases("training")
        # What has not been taken yet, and the whole time since the subscription.
        self._recent, self._whole = (
            {
                phase: {uuid: WindowBuilder(uuid, functools.partial(self._phases.overlap_s, phase)) for uuid in uuids}
                for phase in ("training", "validation")
            }
            for _ in range(2)
        )
        self._latest_percent: dict[str, float] = {}
        self._cpu_s_before = sampler.cpu_s
        self._timelines = {uuid: GpuTimelines(_TIMELINE_POINTS, interval_s) for uuid in uuids}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def failure(self) -> Exception | None:
        """Why the thread had to stop, ``None`` if it did not. What was seen before can still be taken."""
        return self._sampler.failure

    @property
    def thread_cpu_s(self) -> float:
        """CPU time that the thread has spent since the subscription, for all of its readers."""
        return self._sampler.cpu_s - self._cpu_s_before

    @property
    def latest_percent(self) -> float | None:
        """Utilization between the last two polls, the mean of the GPUs; ``None`` if nothing reports it."""
        values = list(self._latest_percent.values())
        return sum(values) / len(values) if values else None

    def enter(self, phase: Phase) -> None:
        """Count what the GPUs do from now on to this phase; a reader begins in training."""
        if self._pid == os.getpid():
            with self._sampler._changed:
                self._phases.enter(phase, time.time())

    def take(self, *, wait_s: float = 0.0, phase: Phase = "training") -> dict[str, GpuWindow]:
        """Return what happened in a phase since the last such call, by UUID.

        Errors and problems are in the window of either phase.

        Args:
            phase: What happened in the other one is kept until it is asked for.
            wait_s: First have the thread poll once more, and wait for that at most this long: for the end of a run.
        """
        return self._read(self._recent[phase], WindowBuilder.take, wait_s)

    def whole(self, *, wait_s: float = 0.0, phase: Phase = "training") -> dict[str, GpuWindow]:
        """Return what happened in a phase since the subscription, whatever has been taken meanwhile, by UUID."""
        return self._read(self._whole[phase], WindowBuilder.so_far, wait_s)

    def _read(
        self, windows: dict[str, WindowBuilder], read: Callable[[WindowBuilder], GpuWindow], wait_s: float
    ) -> dict[str, GpuWindow]:
        if self._pid != os.getpid():  # the thread is the parent's, and the lock may be held by it for ever
            return {}
        if wait_s > 0:
            self._sampler.poll_now(wait_s)
        with self._sampler._changed:
            return {uuid: read(window) for uuid, window in windows.items()}

    def timelines(self, uuid: str) -> dict[str, list[tuple[float, float]]]:
        """Return (seconds since the epoch, value) since the subscription, by metric, in at most 2000 points each.

        The metrics are named as in ``GpuSample``; utilization is ``utilization_percent``. What the GPU does not report
        is absent.
        """
        if self._pid != os.getpid():
            return {}
        with self._sampler._changed:
            return self._timelines[uuid].points()

    def close(self) -> None:
        """Stop collecting; what was collected can still be taken. The thread ends with its last reader. Idempotent."""
        if self._pid == os.getpid():
            with _shared_lock:
                self._sampler.unsubscribe(self)

    def _add(self, sample: GpuSample) -> None:
        if sample.uuid in self.uuids:
            for windows in (*self._recent.values(), *self._whole.values()):
                windows[sample.uuid].add(sample)
            self._timelines[sample.uuid].add(sample)
            percent = mean_percent(sample.utilization)
            if percent is not None:
                self._latest_percent[sample.uuid] = percent


_THREAD_NAME = "lightning-gpu-tools-sampler"
_shared: Sampler | None = None
_shared_lock = threading.Lock()


def subscribe(uuids: Sequence[str], *, interval_s: float = 1.0, gpm: bool = True) -> Reader:
    """Sample these GPUs in the background from now on, every ``interval_s`` seconds or more often.

    Close the reader when it is no longer needed. All readers of a process share one thread, which alone asks the
    driver; this function waits until it has opened the GPUs.

    Args:
        uuids: GPUs and MIG instances.
        interval_s: Other readers may ask for a shorter one. Above 10 s the thread still polls every 10 s, because the
            driver keeps no more of its samples.
        gpm: Whether the GPU performance monitors may be used. They are left alone as long as one reader wants that.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
        ValueError: ``interval_s`` is not positive.
    """
    global _shared
    with _shared_lock:
        if _shared is None or not _shared.running:
            _shared = Sampler()
        return _shared.subscribe(uuids, interval_s, gpm)


def read_gpus() -> tuple[GpuReading, ...]:
    """Read every GPU of this machine, as ``nvml.read_gpus`` does, but not in the thread that calls this.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver, or it does not answer.
    """
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


def _forget() -> None:
    """Begin anew in a forked child: the thread did not come along, and its locks may be held for ever."""
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
