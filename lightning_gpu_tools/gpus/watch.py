"""Metrics, summaries, and problems of the GPUs of one node during one fit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from statistics import fmean

from lightning_gpu_tools.gpus.metrics import (
    GpuSample,
    GpuSummary,
    GpuWindow,
    gpu_metrics,
    over_run,
    rounded,
    with_shares,
)
from lightning_gpu_tools.gpus.readings import GpuReading, not_none
from lightning_gpu_tools.gpus.sampler import Phase, Sampler
from lightning_gpu_tools.gpus.windows import WindowBuilder

_LAST_POLL_S = 2.0  # limit for one more poll at the end of a run


class GpuWatch(Sampler):
    """A sampler of the GPUs of one node: ``gpus`` to log and report, and those that the model is ``trained_on``.

    ``job_pids`` returns the PIDs of this job's processes on the node, in their own namespace.
    """

    def __init__(
        self,
        gpus: Iterable[GpuReading],
        job_pids: Callable[[], frozenset[int] | None],
        *,
        trained_on: Iterable[GpuReading],
        interval_s: float,
        gpm: bool,
        node: int,
    ) -> None:
        self._gpus = {gpu.uuid: gpu for gpu in gpus if gpu.uuid is not None}
        self._trained_on = frozenset(not_none(gpu.uuid for gpu in trained_on))
        self._node = node
        self._started_s = time.time()
        self._energy_joules: dict[str, float] = {}
        self._others_peak_bytes: dict[str, int | None] = {}
        self._noted: dict[str, GpuSample] = {}
        self._taken: tuple[int, frozenset[str]] = (0, frozenset())  # `polled` at the last `take_metrics`
        super().__init__(sorted({*self._gpus, *self._trained_on}), interval_s=interval_s, gpm=gpm)
        from lightning_gpu_tools.gpus import nvml  # imports pynvml

        self._job_pids = job_pids if nvml.pids_are_ours() else lambda: None

    @property
    def own_pids(self) -> frozenset[int] | None:
        """The driver's PIDs of this job's processes on the node; ``None`` if unknown, as in a container."""
        return self._job_pids()

    def trained_on(self, phase: Phase = "training") -> list[GpuWindow]:
        """Return the whole run so far for the GPUs that train the model."""
        return [window for uuid, window in self.whole(phase).items() if uuid in self._trained_on]

    def lost_clock_percent(self) -> float | None:
        """Return the largest loss of clock rate to heat and power, in percent of the highest; ``None`` if unknown."""
        samples = [sample for uuid, sample in self.latest().items() if uuid in self._trained_on]
        lost = (100.0 - (sample.held_clock_percent or 100.0) for sample in samples if sample.throttled_s is not None)
        return max(lost, default=None)

    def note_memory(self) -> None:
        """Record the memory use of the last samples, because torch's counters were read at this moment."""
        self._noted = self.latest()

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
        polled = self.polled
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

    def _read(
        self, windows: dict[str, WindowBuilder], read: Callable[[WindowBuilder], GpuWindow], wait_s: float = 0.0
    ) -> dict[str, GpuWindow]:
        own_pids = self.own_pids
        found = super()._read(windows, read, wait_s)
        return {uuid: with_shares(window, own_pids) for uuid, window in found.items()}

    def summaries(self, *, at_end: bool) -> tuple[GpuSummary, ...]:
        """Return each GPU's summary of the run so far, with one more poll at the end. Safe in any thread."""
        windows = self.whole(wait_s=_LAST_POLL_S if at_end else 0.0)
        validation = self.whole("validation")
        gpus = [(gpu, windows[uuid], validation[uuid]) for uuid, gpu in self._gpus.items() if uuid in windows]
        return tuple(self._summary(*gpu) for gpu in gpus)

    def _summary(self, gpu: GpuReading, window: GpuWindow, validation: GpuWindow) -> GpuSummary:
        timelines = self.timelines(window.uuid)
        power = [watts for _, watts in timelines["power_watts"].points()] if "power_watts" in timelines else []
        return GpuSummary(
            index=gpu.index,
            uuid=window.uuid,
            name=gpu.name,
            node=self._node,
            validation_utilization_percent_mean=validation.utilization_percent_mean,
            power_watts_mean=fmean(power) if power else None,
            others_memory_bytes_max=self._peak_of_others(window),
            timelines={name: rounded(series, series.begin_s - self._started_s) for name, series in timelines.items()},
            **over_run(window, validation),
        )
