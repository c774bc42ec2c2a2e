"""Books the time in which this rank waits for others: on the host in collectives of the CPU and barriers.

The host only queues the collectives of a GPU. There, the end of backward is marked in the GPU's own time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.gpu_timeline import GpuTimeline
from lightning_gpu_tools.training.phases import BACKWARD, RANK_WAIT_IN_STEP, rank_wait_in
from lightning_gpu_tools.training.step_clock import StepClock
from lightning_gpu_tools.training.stopwatch import Account

_Function = Callable[..., Any]


class RankWaits:
    """Takes the waiting for other ranks out of the phases of a clock, on the thread that makes this.

    DistributedDataParallel waits in an autograd callback, after the graph is computed. Autograd calls them in order,
    so one that is queued at the loss, before all others, marks the end of this rank's computing.
    """

    def __init__(self, clock: StepClock) -> None:
        self.gpu: GpuTimeline | None = None  # where the same is marked in the GPU's own time
        self.unseen = False  # whether the phase of a backward may hold waiting, too
        self._clock = clock
        self._thread = threading.get_ident()
        self._accounts: dict[Account, Account] = {}
        self._around = clock.current
        self._has_computed = False
        self._queue = compat.queue_in_backward()

    def timed(self, function: _Function) -> _Function:
        """Return what waits for other ranks, such as ``Work.wait``, booked as such on this thread."""

        def waiting(*args: Any, **kwargs: Any) -> Any:
            clock = self._clock
            if not clock.running or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            around = clock.switch(self._wait_within(clock.current))
            try:
                return function(*args, **kwargs)
            finally:
                clock.switch(around)

        return waiting

    def around_backward(self, backward: _Function) -> _Function:
        """Return what runs backward, with the wait at its end booked as such."""

        def timed(loss: Any, *args: Any, **kwargs: Any) -> Any:
            if self.unseen or not self._clock.running:
                return backward(loss, *args, **kwargs)
            self._has_computed = False
            node = getattr(loss, "grad_fn", None)
            hook = None if node is None else node.register_prehook(self._begins)
            try:
                return backward(loss, *args, **kwargs)
            finally:
                if hook is not None:
                    hook.remove()
                self.unseen = not self._has_computed

        return timed

    def waited_within(self, phase: str) -> bool:
        """Return whether collectives were waited for in this phase, also if it took the host no time, as on a GPU."""
        return any(account.phase == phase for account in self._accounts)

    def _wait_within(self, account: Account) -> Account:
        if account not in self._accounts:
            self._accounts[account] = self._clock.account(rank_wait_in(account.phase))
        return self._accounts[account]

    # Autograd calls these three.

    def _begins(self, gradients: object) -> None:
        self._call_later(self._computed)

    def _computed(self) -> None:
        self._around = self._clock.current
        if self._call_later(self._waited):  # comes after DistributedDataParallel's
            self._has_computed = True
            self._clock.switch(self._wait_within(self._around))
            if self.gpu is not None:
                self.gpu.enter(RANK_WAIT_IN_STEP)

    def _waited(self) -> None:
        if self.gpu is not None:
            self.gpu.enter(BACKWARD)
        self._clock.switch(self._around)

    def _call_later(self, function: Callable[[], None]) -> bool:
        try:
            self._queue(function)
        except Exception:  # noqa: BLE001 - whatever a release of torch has against it would end the user's backward
            return False
        return True
