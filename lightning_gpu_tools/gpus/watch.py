"""The GPUs of one node in one fit, as the monitor sees them: what to log, what to report, what to warn of."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from lightning_gpu_tools.gpus import sampler
from lightning_gpu_tools.gpus.metrics import GpuSummary, gpu_metrics, gpu_summary
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.gpus.samples import GpuWindow
from lightning_gpu_tools.gpus.sharing import Sharing, share_out

# How long the end of a run waits for one more look at the GPUs; a look takes a few milliseconds.
_LAST_LOOK_S = 2.0


class GpuWatch:
    """Watches some GPUs until it is closed.

    Args:
        gpus: Which, with the index to show.
        interval_s: Seconds between two looks.
        gpm: Whether the GPU performance monitors may be used.
        node: Number of the node.

    Attributes:
        own_pids: This job's processes on the node by the driver's numbers; ``None`` as long as they are unknown.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
    """

    def __init__(self, gpus: Sequence[GpuReading], *, interval_s: float, gpm: bool, node: int) -> None:
        self.own_pids: frozenset[int] | None = None
        self._gpus = [gpu for gpu in gpus if gpu.uuid is not None]
        self._node = node
        self._started_s = time.time()
        uuids = [gpu.uuid for gpu in self._gpus if gpu.uuid is not None]
        self._energy_joules: dict[str, float] = {}
        self._others_peak_bytes: dict[str, int] = {}
        self._since_log = sampler.subscribe(uuids, interval_s=interval_s, gpm=gpm)
        self._whole_run = sampler.subscribe(uuids, interval_s=interval_s, gpm=gpm)

    @property
    def latest_percent(self) -> float | None:
        """Utilization between the last two looks, the mean of the GPUs; ``None`` if nothing reports it."""
        return self._since_log.latest_percent

    @property
    def thread_cpu_s(self) -> float:
        """CPU time of the thread that looks."""
        return self._whole_run.thread_cpu_s

    def enter(self, phase: sampler.Phase) -> None:
        """Keep what happens from here on apart from the other phase."""
        self._since_log.enter(phase)
        self._whole_run.enter(phase)

    def take(self) -> tuple[dict[str, float], list[str]]:
        """Return the metrics since the last call, and what went wrong, in words."""
        windows = self._since_log.take()
        validation = self._since_log.take(phase="validation")
        metrics: dict[str, float] = {}
        troubles: list[str] = []
        for gpu in self._gpus:
            window = windows.get(gpu.uuid or "")
            if window is None:
                continue
            energy = self._count_energy(window, validation[window.uuid])
            sharing = self._count_sharing(window)
            metrics |= gpu_metrics(gpu.index, window, sharing, energy, self._node)
            node = f" of node {self._node}" if self._node else ""
            troubles += [f"GPU {gpu.index}{node} reports: {error}." for error in window.errors]
            troubles += window.problems
        if self._since_log.failure is not None:
            troubles.append(f"The GPUs are no longer measured: {self._since_log.failure!r}.")
        return metrics, troubles

    def _count_energy(self, *windows: GpuWindow) -> float | None:
        for window in windows:
            if window.energy_joules is not None:
                self._energy_joules[window.uuid] = self._energy_joules.get(window.uuid, 0.0) + window.energy_joules
        # A GPU that can no longer be read has no reading now, though its sum is known.
        reported = any(window.energy_joules is not None for window in windows)
        return self._energy_joules[windows[0].uuid] if reported else None

    def _count_sharing(self, window: GpuWindow) -> Sharing:
        sharing = share_out(window.processes, self.own_pids)
        others = sharing.others_memory_bytes
        if others is not None:
            self._others_peak_bytes[window.uuid] = max(others, self._others_peak_bytes.get(window.uuid, 0))
        return sharing

    def summaries(self, *, at_end: bool) -> tuple[GpuSummary, ...]:
        """Return each GPU over the whole run so far; at its end the GPUs are looked at once more."""
        windows = self._whole_run.so_far(wait_s=_LAST_LOOK_S if at_end else 0.0)
        validation = self._whole_run.so_far(phase="validation")
        return tuple(self._summary(gpu, windows, validation) for gpu in self._gpus if gpu.uuid in windows)

    def _summary(self, gpu: GpuReading, windows: dict[str, GpuWindow], validation: dict[str, GpuWindow]) -> GpuSummary:
        assert gpu.uuid is not None
        window = windows[gpu.uuid]
        sharing = self._count_sharing(window)
        return gpu_summary(
            gpu,
            window,
            validation[gpu.uuid],
            self._whole_run.timelines(gpu.uuid),
            node=self._node,
            started_s=self._started_s,
            sharing=sharing,
            others_memory_bytes_max=self._others_peak_bytes.get(gpu.uuid),
            energy_joules=_sum(window.energy_joules for window in (window, validation[gpu.uuid])),
        )

    def close(self) -> None:
        """Let go of the sampler; idempotent."""
        self._since_log.close()
        self._whole_run.close()


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
