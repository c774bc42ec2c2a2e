"""Sampling of the GPUs of one node during one fit, and the metrics, summaries and problems of these GPUs."""

import contextlib
import dataclasses
import functools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from lightning_gpu_tools.background import BackgroundJobs
from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import limits
from lightning_gpu_tools.gpus.metrics import (
    GpuSample,
    GpuSummary,
    GpuWindow,
    Timeline,
    gpu_metrics,
    over_run,
    rounded,
    with_shares,
)
from lightning_gpu_tools.gpus.readings import GpuReading, not_none, weights_s
from lightning_gpu_tools.gpus.windows import WindowBuilder, overlap_s
from lightning_gpu_tools.units import printable

if TYPE_CHECKING:
    from lightning_gpu_tools.gpus.nvml.probe import GpuProbe

Phase = Literal["training", "validation"]  # each window covers one of them

_MAX_INTERVAL_S = 10.0  # the driver's buffer holds about 20 s
_TIMELINE_POINTS = 2000  # the width of a screen; about 10 kB per metric in a report
_TIMELINES = ("utilization_percent", "memory_used_bytes", "power_watts")
_LAST_POLL_S = 2.0  # limit for one more poll at the end of a run


class GpuWatch:
    """A job in a thread that samples GPUs and MIG instances until it is closed, and aggregates the samples.

    ``gpus`` are those to log and report, and the model is ``trained_on`` some of these or others. ``job_pids`` returns
    the PIDs of this job's processes on the node, in their own namespace.

    The constructor raises ``NvmlUnavailableError`` without a usable NVIDIA driver. If reading a GPU fails later, or the
    driver does not answer for it, its windows report that as a problem, and the other GPUs are still sampled. In a
    forked child, which has no such thread, the watch is empty.
    """

    def __init__(
        self,
        gpus: Iterable[GpuReading],
        job_pids: Callable[[], frozenset[int] | None],
        *,
        trained_on: Iterable[GpuReading],
        interval_s: float,
        node: int,
    ) -> None:
        from lightning_gpu_tools.gpus import nvml  # imports pynvml

        # Returns the driver's PIDs of this job's processes on the node; None if unknown, as in a container.
        self.own_pids = job_pids if nvml.pids_are_ours() else lambda: None
        self.calls_cpu_s = 0.0  # CPU time of all calls, which have threads of their own
        self._gpus = {gpu.uuid: gpu for gpu in gpus if gpu.uuid is not None}
        self._trained_on = frozenset(not_none(gpu.uuid for gpu in trained_on))
        self._interval_s = min(interval_s, _MAX_INTERVAL_S)
        self._node = node
        self._started_s = time.time()
        self._energy_joules: dict[str, float] = {}
        self._others_peak_bytes: dict[str, int | None] = {}
        self._noted: dict[str, GpuSample] = {}
        self._taken: tuple[int, set[str]] = (0, set())  # at the last `take_metrics`: polls, and GPUs without samples
        self._pid = os.getpid()
        # When each phase began, as far back as samples reach.
        self._phases: deque[tuple[float, str]] = deque([(-math.inf, "training")], maxlen=1000)
        uuids = sorted({*self._gpus, *self._trained_on})
        # Since the last `take`, and over the whole run.
        self._recent, self._whole = (
            {
                phase: {uuid: WindowBuilder(uuid, functools.partial(overlap_s, self._phases, phase)) for uuid in uuids}
                for phase in ("training", "validation")
            }
            for _ in range(2)
        )
        self._timelines = {
            uuid: {name: Timeline(_TIMELINE_POINTS, interval_s) for name in _TIMELINES} for uuid in uuids
        }
        self._latest: dict[str, GpuSample] = {}
        self._probes: dict[str, GpuProbe] = {}
        self._failures: dict[str, Exception] = {}  # GPU -> why it is no longer measured
        self._begun = self._done = 0  # polls
        self._polled = threading.Condition()  # its lock guards everything that is collected
        self.jobs = BackgroundJobs()
        self.jobs.add("Sampling of the GPUs", self._poll)
        with self._polled:
            self._polled.wait_for(lambda: self._done, limits.LIMIT_S)
        for error in [*self._failures.values()]:
            if isinstance(error, NvmlUnavailableError):
                self.jobs.close()
                raise error

    def enter(self, phase: Phase) -> None:
        """Assign samples to this phase from now on. The first phase is training."""
        if self._pid == os.getpid():  # in a forked child, a thread of the parent may hold the lock forever
            with self._polled:
                self._phases.append((time.time(), phase))

    def take(self, phase: Phase = "training") -> dict[str, GpuWindow]:
        """Return the windows of a phase since the last call for it, by UUID. Windows of both phases have the errors."""
        return self._read(self._recent[phase], WindowBuilder.take)

    def whole(self, phase: Phase = "training", *, wait_s: float = 0.0) -> dict[str, GpuWindow]:
        """Return the windows of a phase so far, by UUID, after one more poll if it ends within ``wait_s``."""
        return self._read(self._whole[phase], WindowBuilder.so_far, wait_s)

    def trained_on(self, phase: Phase = "training") -> list[GpuWindow]:
        """Return the whole run so far for the GPUs that train the model."""
        return [window for uuid, window in self.whole(phase).items() if uuid in self._trained_on]

    def lost_clock_percent(self) -> float | None:
        """Return the largest loss of clock rate to heat and power, in percent of the highest; ``None`` if unknown."""
        values = [sample.values for uuid, sample in self._latest_samples().items() if uuid in self._trained_on]
        held = [one.get("held_clock_percent", 100.0) for one in values if "throttled_percent" in one]
        return 100.0 - min(held) if held else None

    def note_memory(self) -> None:
        """Record the memory use of the last samples, because torch's counters were read at this moment."""
        self._noted = self._latest_samples()

    def noted_memory(self) -> list[GpuSample]:
        """Return the last recorded samples of the GPUs that train the model, with their processes' owners and names."""
        from lightning_gpu_tools.gpus import nvml  # imports pynvml

        return [
            dataclasses.replace(
                sample,
                utilization=(),
                processes=None if sample.processes is None else nvml.identified(sample.processes),
            )
            for uuid, sample in self._noted.items()
            if uuid in self._trained_on
        ]

    def take_metrics(self) -> tuple[dict[str, float], list[str]]:
        """Return the metrics and the descriptions of problems since the last call; empty if there was no new poll."""
        polled = self._done, {uuid for uuid in self._timelines if uuid in self._failures or limits.is_late(uuid)}
        if polled == self._taken:
            return {}, []
        self._taken = polled
        windows, validation = self.take(), self.take("validation")
        metrics: dict[str, float] = {}
        problems: list[str] = []
        for uuid, gpu in self._gpus.items():
            window = windows.get(uuid)
            if window is None:
                continue
            self._others_peak_bytes[uuid] = self._peak_of_others(window)
            joules = not_none(part.energy_joules for part in (window, validation[uuid]))
            self._energy_joules[uuid] = self._energy_joules.get(uuid, 0.0) + sum(joules)
            energy = self._energy_joules[uuid] if joules else None  # omitted if the GPU can no longer be read
            metrics |= gpu_metrics(gpu.index, window, energy, self._node)
            node = f" of node {self._node}" if self._node else ""
            problems += [f"GPU {gpu.index}{node} reports an error: {error}." for error in window.errors]
            problems += window.problems
        return metrics, problems

    def _peak_of_others(self, window: GpuWindow) -> int | None:
        return max(not_none([self._others_peak_bytes.get(window.uuid), window.others_memory_bytes]), default=None)

    def summaries(self, *, at_end: bool) -> tuple[GpuSummary, ...]:
        """Return each GPU's summary of the run so far, with one more poll at the end. Safe in any thread."""
        windows = self.whole(wait_s=_LAST_POLL_S if at_end else 0.0)
        validation = self.whole("validation")
        gpus = [(gpu, windows[uuid], validation[uuid]) for uuid, gpu in self._gpus.items() if uuid in windows]
        return tuple(self._summary(*gpu) for gpu in gpus)

    def _summary(self, gpu: GpuReading, window: GpuWindow, validation: GpuWindow) -> GpuSummary:
        with self._polled:
            series = {name: timeline.series() for name, timeline in self._timelines[window.uuid].items()}
        power = [watts for _, watts in series["power_watts"].points()]
        return GpuSummary(
            index=gpu.index,
            uuid=window.uuid,
            name=gpu.name,
            node=self._node,
            power_watts_mean=fmean(power) if power else None,
            others_memory_bytes_max=self._peak_of_others(window),
            timelines={
                name: rounded(found, found.begin_s - self._started_s) for name, found in series.items() if found.values
            },
            **over_run(window, validation),
        )

    def close(self) -> None:
        """End the thread. Collected data can still be taken."""
        if self._pid == os.getpid():
            self.jobs.close()
            with contextlib.suppress(RuntimeError):  # Python, which is ending, starts no thread
                limits.answers({uuid: probe.close for uuid, probe in self._probes.items()}, limits.LIMIT_S)

    def _latest_samples(self) -> dict[str, GpuSample]:
        """Return the last sample of each GPU, by UUID."""
        if self._pid != os.getpid():
            return {}
        with self._polled:
            return dict(self._latest)

    def _read(
        self, windows: dict[str, WindowBuilder], read: Callable[[WindowBuilder], GpuWindow], wait_s: float = 0.0
    ) -> dict[str, GpuWindow]:
        if self._pid != os.getpid():  # the parent's thread may hold the lock forever
            return {}
        with self._polled:
            if wait_s > 0:
                wanted = self._begun + 1
                self.jobs.run_now()
                self._polled.wait_for(lambda: self._done >= wanted or self.jobs.is_closed, min(wait_s, limits.LIMIT_S))
            found = {uuid: read(window) for uuid, window in windows.items()}
        problems = {
            uuid: f"{uuid} is no longer measured after an unexpected error: {printable(repr(error), 200)}."
            for uuid, error in [*self._failures.items()]
        }
        for uuid in filter(limits.is_late, found):
            late = f"The driver has not answered for {uuid} within {limits.LIMIT_S:.0f} s"
            problems[uuid] = f"{late}. This GPU is not measured until it answers. Check `dmesg`."
        for uuid, problem in problems.items():
            found[uuid] = dataclasses.replace(found[uuid], problems=(*found[uuid].problems, problem))
        own_pids = self.own_pids()
        return {uuid: with_shares(window, own_pids) for uuid, window in found.items()}

    def _poll(self) -> float:
        self._begun += 1
        # A GPU that hangs delays the others once. It is not asked again until it has answered.
        reads = {uuid: functools.partial(self._sample, uuid) for uuid in self._timelines if uuid not in self._failures}
        limits.answers(reads, limits.LIMIT_S)
        with self._polled:
            self._done += 1
            self._polled.notify_all()
        return self._interval_s  # the first sample is the baseline of the counters

    def _sample(self, uuid: str) -> None:
        """Read a GPU, in a thread of its own, and add the sample, even if it comes late."""
        try:
            if uuid not in self._probes:
                from lightning_gpu_tools.gpus.nvml.probe import GpuProbe  # only now: it imports pynvml

                self._probes[uuid] = GpuProbe(uuid)
            sample = self._probes[uuid].read()
            with self._polled:
                self._add(sample)
        except Exception as error:  # noqa: BLE001 - training continues after any error
            self._failures[uuid] = error
        finally:
            with self._polled:
                self.calls_cpu_s += time.thread_time()

    def _add(self, sample: GpuSample) -> None:
        for windows in (*self._recent.values(), *self._whole.values()):
            windows[sample.uuid].add(sample)
        timelines = self._timelines[sample.uuid]
        for entry, seconds in zip(sample.utilization, weights_s(sample.utilization), strict=True):
            timelines["utilization_percent"].add(entry.time_s, entry.percent, seconds)
        for name in _TIMELINES[1:]:
            if name in sample.values:
                timelines[name].add(sample.time_s, sample.values[name])
        self._latest[sample.uuid] = sample
