"""A GPU with one queue, on a clock that the test moves: it stands in for torch.cuda.Event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from trainings import HandClock


# CUDA holds some thousand launches and then lets the host wait; here 10 launches are a step.
_QUEUE = 30


class SimulatedGpu:
    """Does what is launched one after the other, while the host goes on until the queue is full.

    Attributes:
        busy: When kernels ran: (begin, end) in seconds of the clock. A copy is no kernel.
        waited_for: How often somebody asked the host to wait for the GPU.
    """

    def __init__(self, clock: HandClock) -> None:
        self.clock = clock
        self.busy: list[tuple[float, float]] = []
        self.waited_for = 0
        self._free_s = 0.0
        self._queue: deque[float] = deque()

    def launch(self, seconds: float, kernel: bool = True) -> None:
        if len(self._queue) == _QUEUE:
            self.clock.now_s = max(self.clock(), self._queue.popleft())
        begin_s = max(self.clock(), self._free_s)
        self._free_s = begin_s + seconds
        self._queue.append(self._free_s)
        if kernel:
            self.busy.append((begin_s, self._free_s))

    def copy(self, seconds: float, pageable: bool) -> None:
        """Copy a batch; out of pageable memory the host waits for it, and for all that comes before it."""
        self.launch(seconds, kernel=False)
        if pageable:
            self.clock.now_s = self._free_s

    def synchronize(self) -> None:
        self.waited_for += 1
        self.clock.now_s = max(self.clock(), self._free_s)

    def utilization_percent(self, since_s: float) -> float:
        """Return the share of the time up to now in which a kernel ran."""
        busy_s = sum(max(0.0, min(end, self.clock()) - max(begin, since_s)) for begin, end in self.busy)
        return 100 * busy_s / (self.clock() - since_s)

    def install(self, set_attribute: Callable[[Any, str, Any], None]) -> None:
        """Be torch's GPU, as far as events go."""
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.passed_s: float | None = None

            def record(self) -> None:
                self.passed_s = max(gpu.clock(), gpu._free_s)

            def query(self) -> bool:
                return self.passed_s is None or gpu.clock() >= self.passed_s

            def elapsed_time(self, end_event: Event) -> float:
                assert self.query()
                assert end_event.query(), "CUDA raises an error here"
                assert self.passed_s is not None
                assert end_event.passed_s is not None
                return float(torch.tensor(end_event.passed_s - self.passed_s, dtype=torch.float32)) * 1e3

            def synchronize(self) -> None:
                gpu.synchronize()

        set_attribute(torch.cuda, "Event", Event)
        set_attribute(torch.cuda, "synchronize", gpu.synchronize)
