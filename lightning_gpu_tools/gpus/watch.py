"""The GPUs of one node in one fit: what to log, what to report, what to warn of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from lightning_gpu_tools.gpus.metrics import GpuSample, GpuSummary, GpuWindow, gpu_metrics, gpu_summary
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.gpus.sampler import Phase, Sampler
from lightning_gpu_tools.gpus.sharing import Sharing, share_out

# How long the end of a run waits for one more poll of the GPUs; it takes a few milliseconds.
_LAST_POLL_S = 2.0


class GpuWatch:
    """Samples some GPUs until it is closed.

    Args:
        gpus: Those to log and report, with the index to show.
        own_pids: Returns this job's processes on the node by the driver's numbers; ``None`` if they are unknown.
        trained_on: UUIDs of those that the model trains on, sampled in any case.
        interval_s: Seconds between two polls.
        gpm: Whether the GPU performance monitors may be used.
        node: Number of the node.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
    """

    def __init__(
        self,
        gpus: Sequence[GpuReading],
        own_pids: Callable[[], frozenset[int] | None],
        *,
        trained_on: Iterable[str],
        interval_s: float,
        gpm: bool,
        node: int,
    ) -> None:
        self._gpus = {gpu.uuid: gpu for gpu in gpus if gpu.uuid is not None}
        self._own_pids = own_pids
        self._trained_on = frozenset(trained_on)
        self._node = node
        self._started_s = time.time()
        self._energy_joules: dict[str, float] = {}
        self._others_peak_bytes: dict[str, int] = {}
        self._noted: dict[str, GpuSample] = {}
        self._sampler = Sampler(sorted({*self._gpus, *self._trained_on}), interval_s=interval_s, gpm=gpm)
        self.enter = self._sampler.enter

    @property
    def latest_percent(self) -> float | None:
        """Utilization between the last two polls, the mean of the GPUs; ``None`` if nothing reports it."""
        return self._sampler.latest_percent

    @property
    def thread_cpu_s(self) -> float:
        """CPU time of the sampling thread."""
        return self._sampler.cpu_s

    def trained_on(self, phase: Phase = "training") -> list[GpuWindow]:
        """Return the whole run so far of the GPUs that the model trains on."""
        return [window for uuid, window in self._sampler.whole(phase=phase).items() if uuid in self._trained_on]

    def throttled_percent(self) -> dict[int, float]:
        """Return, of the GPUs that the model trains on, the share of the run so far in which clocks were held down."""
        windows = {window.uuid: window.throttled_percent for window in self.trained_on()}
        shares = {gpu.index: windows.get(uuid) for uuid, gpu in self._gpus.items()}
        return {index: share for index, share in shares.items() if share is not None}

    def sharing(self, window: GpuWindow) -> Sharing:
        """Return who uses what of a GPU."""
        return share_out(window.processes, self._own_pids())

    def note_memory(self) -> None:
        """Note who uses what of the memory by the last samples: what torch counts was read at this moment."""
        self._noted = self._sampler.latest_listed()

    def noted_memory(self) -> list[tuple[GpuReading, GpuSample]]:
        """Return the GPUs that the model trains on with the samples that were noted last."""
        return [
            (gpu, self._noted[uuid])
            for uuid, gpu in self._gpus.items()
            if uuid in self._trained_on and uuid in self._noted
        ]

    def take(self) -> tuple[dict[str, float], list[str]]:
        """Return the metrics since the last call, and what went wrong, in words."""
        windows, validation = self._sampler.take(), self._sampler.take(phase="validation")
        metrics: dict[str, float] = {}
        troubles: list[str] = []
        for uuid, gpu in self._gpus.items():
            if uuid not in windows:
                continue
            window = windows[uuid]
            energy = self._count_energy(window, validation[uuid])
            metrics |= gpu_metrics(gpu.index, window, self._count_sharing(window), energy, self._node)
            node = f" of node {self._node}" if self._node else ""
            troubles += [f"GPU {gpu.index}{node} reports: {error}." for error in window.errors]
            troubles += window.problems
        if self._sampler.failure is not None:
            troubles.append(f"The GPUs are no longer measured: {self._sampler.failure!r}.")
        return metrics, troubles

    def _count_energy(self, *windows: GpuWindow) -> float | None:
        known = [window.energy_joules for window in windows if window.energy_joules is not None]
        if not known:  # a GPU that can no longer be read has no reading now, though its sum is known
            return None
        uuid = windows[0].uuid
        self._energy_joules[uuid] = self._energy_joules.get(uuid, 0.0) + sum(known)
        return self._energy_joules[uuid]

    def _count_sharing(self, window: GpuWindow) -> Sharing:
        sharing = self.sharing(window)
        others = sharing.others_memory_bytes
        if others is not None:
            self._others_peak_bytes[window.uuid] = max(others, self._others_peak_bytes.get(window.uuid, 0))
        return sharing

    def summaries(self, *, at_end: bool) -> tuple[GpuSummary, ...]:
        """Return each GPU over the whole run so far, from any thread; at its end the GPUs are polled once more."""
        windows = self._sampler.whole(wait_s=_LAST_POLL_S if at_end else 0.0)
        validation = self._sampler.whole(phase="validation")
        found = []
        for uuid, gpu in self._gpus.items():
            if uuid not in windows:
                continue
            sharing = self.sharing(windows[uuid])
            peaks = [self._others_peak_bytes.get(uuid), sharing.others_memory_bytes]
            found.append(
                gpu_summary(
                    gpu,
                    windows[uuid],
                    validation[uuid],
                    self._sampler.timelines(uuid),
                    node=self._node,
                    started_s=self._started_s,
                    sharing=sharing,
                    others_memory_bytes_max=max((peak for peak in peaks if peak is not None), default=None),
                )
            )
        return tuple(found)

    def close(self) -> None:
        """Stop sampling; what was sampled stays. Idempotent."""
        self._sampler.close()
