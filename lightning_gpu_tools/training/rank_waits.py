"""Accounting of this rank's waits for other ranks: on the host, in CPU collectives and barriers.

The host only queues GPU collectives. On a GPU, the end of backward is marked on its own timeline.
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
    """Separation of waits for other ranks from the phases of a clock, on the thread that creates this object.

    DistributedDataParallel waits in an autograd callback after the graph has run. Autograd calls callbacks in order,
    so a callback that is queued at the loss, before all others, marks the end of this rank's computation.
    """

    def __init__(self, clock: StepClock) -> None:
        self.gpu: GpuTimeline | None = None  # marks the same waits on the GPU's own timeline
        self.unseen = False  # whether a backward's phase may include waiting
        self._clock = clock
        self._thread = threading.get_ident()
        self._accounts: dict[Account, Account] = {}
        self._around = clock.current
        self._has_computed = False
        self._queue = compat.find(compat.QUEUE_IN_BACKWARD)

    def timed(self, function: _Function) -> _Function:
        """Wrap a function that waits for other ranks, such as ``Work.wait``, to charge this thread's time as a wait."""

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

    def around_buffers(self, send: _Function) -> _Function:
        """Wrap the function with which DDP sends buffers in forward to charge it as a wait, also on the GPU."""
        timed = self.timed(send)

        def sending(*args: Any, **kwargs: Any) -> Any:
            function = timed if self.gpu is None else self.gpu.part(RANK_WAIT_IN_STEP, send)
            return function(*args, **kwargs)

        return sending

    def around_backward(self, backward: _Function) -> _Function:
        """Wrap a function that runs backward to charge the wait at its end as a wait."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            # With compiled autograd, a hook would become part of the compiled code.
            self.unseen = self.unseen or compat.compiles_backward()
            if self.unseen or not self._clock.running:
                return backward(*args, **kwargs)
            self._has_computed = False
            node = getattr(args[0] if args else None, "grad_fn", None)
            hook = None if node is None else node.register_prehook(self._begins)
            try:
                return backward(*args, **kwargs)
            finally:
                if hook is not None:
                    hook.remove()
                self.unseen = not self._has_computed

        return timed

    @property
    def unseen_on_gpu(self) -> bool:
        """Whether the GPU's time in a backward may include waiting."""
        return self.unseen or compat.waits_for_each_bucket()

    def waited_within(self, phase: str) -> bool:
        """Return whether this phase waited for collectives, even if that took the host no time, as on a GPU."""
        return any(account.phase == phase for account in self._accounts)

    def _enter(self, phase: str) -> None:
        if self.gpu is not None:
            self.gpu.enter(phase)

    def _wait_within(self, account: Account) -> Account:
        if account not in self._accounts:
            self._accounts[account] = self._clock.account(rank_wait_in(account.phase))
        return self._accounts[account]

    # Autograd calls these three.

    def _begins(self, gradients: object) -> None:
        self._call_later(self._computed)

    def _computed(self) -> None:
        self._around = self._clock.current
        if self._call_later(self._waited):  # runs after DistributedDataParallel's callback
            self._has_computed = True
            self._clock.switch(self._wait_within(self._around))
            self._enter(RANK_WAIT_IN_STEP)

    def _waited(self) -> None:
        self._enter(BACKWARD)
        self._clock.switch(self._around)

    def _call_later(self, function: Callable[[], None]) -> bool:
        try:
            self._queue(function)
        except Exception:  # noqa: BLE001 - an error from an incompatible torch release would end the user's backward
            return False
        return True
