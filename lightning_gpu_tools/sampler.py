"""The background thread that looks at the GPUs: one for each process, however many callbacks want to know.

The driver buffers its utilization samples for some seconds, so looking once a second misses none of them. All that
happens in the training thread is ``Reader.take``, which adds up numbers and asks no driver.

    with subscribe([uuid], interval_s=1.0) as reader:
        ...
        window = reader.take()[uuid]
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_gpu_tools.gpu_window import GpuTimelines, WindowBuilder
from lightning_gpu_tools.readings import GpuSample, GpuWindow

# The driver's buffer holds about 20 s; look at least this often, so that nothing in it is overwritten unseen.
_LONGEST_INTERVAL_S = 10.0

# Enough for a chart as wide as a screen; about 100 kB a metric.
_TIMELINE_POINTS = 2000

# How long to wait for a look that hangs in the driver, as it does with a GPU that is falling off the bus.
_PATIENCE_S = 5.0


class Probe(Protocol):
    """What the thread reads: ``nvml.GpuProbe``."""

    def read(self) -> GpuSample:
        """Return what happened since the last look."""

    def close(self) -> None:
        """Give everything back."""


def _open_probe(uuid: str) -> Probe:
    from lightning_gpu_tools.nvml import GpuProbe  # only now: importing it imports pynvml

    return GpuProbe(uuid)


class Sampler:
    """One thread that looks at some GPUs every so often. Use ``subscribe``, which shares it.

    The thread runs while there is a reader. It never raises: if it has to stop, ``failure`` says why.

    Args:
        open_probe: Gives what reads one GPU, by its UUID.
    """

    def __init__(self, open_probe: Callable[[str], Probe] = _open_probe) -> None:
        self._open_probe = open_probe
        self._probes: dict[str, Probe] = {}
        self._readers: list[Reader] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._changed = threading.Condition()  # guards what follows, and what the readers have collected
        self._stopping = False
        self._looks_begun = 0
        self._looks_done = 0
        self.failure: Exception | None = None

    @property
    def running(self) -> bool:
        """Whether there is a thread that another reader can use."""
        return self._thread is not None and not self._stopping and self.failure is None

    def subscribe(self, uuids: Sequence[str], interval_s: float = 1.0) -> Reader:
        """Look at these GPUs, too; see ``subscribe`` of this module."""
        if not interval_s > 0:
            raise ValueError(f"interval_s must be positive, got {interval_s!r}.")
        new = {uuid: self._open_probe(uuid) for uuid in dict.fromkeys(uuids) if uuid not in self._probes}
        reader = Reader(self, uuids, interval_s)
        with self._changed:
            self._probes.update(new)
            self._readers.append(reader)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lightning-gpu-tools-sampler", daemon=True)
                self._thread.start()
        self._wake.set()  # the first look gives the counters their start
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
        self._thread.join(_PATIENCE_S)
        if not self._thread.is_alive():  # else it hangs in the driver, and so would this
            for probe in self._probes.values():
                probe.close()

    def look_now(self, timeout_s: float) -> bool:
        """Have the thread look at once and wait for it; ``False`` if that did not come to an end in time."""
        with self._changed:
            wanted = self._looks_begun + 1
            self._wake.set()
            self._changed.wait_for(lambda: self._looks_done >= wanted or not self.running, timeout_s)
            return self._looks_done >= wanted

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    interval_s = min([_LONGEST_INTERVAL_S, *(reader.interval_s for reader in self._readers)])
                self._wake.wait(interval_s)
                self._wake.clear()
                if self._stopping:
                    return
                self._look()
        # The top of a thread is the one place for this: whatever it was, training goes on, and `failure` tells it.
        except Exception as error:  # noqa: BLE001
            with self._changed:
                self.failure = error
                self._changed.notify_all()

    def _look(self) -> None:
        with self._changed:
            self._looks_begun += 1
            probes = list(self._probes.values())
        samples = [probe.read() for probe in probes]  # this takes time, and the lock is free meanwhile
        with self._changed:
            for reader in self._readers:
                for sample in samples:
                    reader._add(sample)
            self._looks_done += 1
            self._changed.notify_all()


class Reader:
    """What one user of a sampler has not yet taken. Safe to leave behind in a forked child, where it is empty."""

    def __init__(self, sampler: Sampler, uuids: Sequence[str], interval_s: float) -> None:
        self.interval_s = interval_s
        self._sampler = sampler
        self._pid = os.getpid()
        self._windows = {uuid: WindowBuilder(uuid) for uuid in uuids}
        self._timelines = {uuid: GpuTimelines(_TIMELINE_POINTS, interval_s) for uuid in uuids}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def failure(self) -> Exception | None:
        """Why the thread had to stop, ``None`` if it did not. What was seen before can still be taken."""
        return self._sampler.failure

    def take(self, *, wait_s: float = 0.0) -> dict[str, GpuWindow]:
        """Return what happened since the last call, by UUID.

        Args:
            wait_s: First have the thread look once more, and wait for that at most so long: for the end of a run.
        """
        if self._pid != os.getpid():  # the thread is the parent's, and the lock may be held by it for ever
            return {}
        if wait_s > 0:
            self._sampler.look_now(wait_s)
        with self._sampler._changed:
            return {uuid: window.take() for uuid, window in self._windows.items()}

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
        if sample.uuid in self._windows:
            self._windows[sample.uuid].add(sample)
            self._timelines[sample.uuid].add(sample)


_shared: Sampler | None = None
_shared_lock = threading.Lock()


def subscribe(uuids: Sequence[str], *, interval_s: float = 1.0) -> Reader:
    """Look at these GPUs in the background from now on, every ``interval_s`` seconds or more often.

    Close the reader when it is no longer needed. All readers of a process share one thread.

    Args:
        uuids: GPUs and MIG instances.
        interval_s: Other readers may ask for a shorter one. Above 10 s the thread still looks every 10 s, because the
            driver keeps no more of its samples.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
        ValueError: ``interval_s`` is not positive.
    """
    global _shared
    with _shared_lock:
        if _shared is None or not _shared.running:
            _shared = Sampler()
        return _shared.subscribe(uuids, interval_s)


def _forget() -> None:
    """Begin anew in a forked child: the thread did not come along, and its locks may be held for ever."""
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
