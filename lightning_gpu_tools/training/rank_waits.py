"""Books the time for which this rank waits for others, where the host waits: in collectives on the CPU.

On a GPU the host only queues a collective and goes on; there nothing of this takes any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.phases import rank_wait_in
from lightning_gpu_tools.training.step_clock import StepClock

_Function = Callable[..., Any]


class RankWaits:
    """Takes the waiting for other ranks out of the phases of a clock, on the thread that makes this.

    In backward, DistributedDataParallel waits for the other ranks when the graph has been computed: in a callback that
    it gives to autograd. Callbacks run in the order in which autograd gets them, so one that the loss's own hook gives
    it, the first hook of all, marks the end of this rank's computing. No hook is put on a parameter, so it does not
    matter which of them take part, nor when they change.

    Args:
        clock: Whose phases.

    Attributes:
        unseen: Whether something could not be told apart: then the phases hold waiting, too.
    """

    def __init__(self, clock: StepClock) -> None:
        self.unseen = False
        self._clock = clock
        self._thread = threading.get_ident()
        self._ended = False

    def timed(self, function: _Function) -> _Function:
        """Return what waits for other ranks, such as ``Work.wait``, with its time booked as such on this thread."""

        def waiting(*args: Any, **kwargs: Any) -> Any:
            clock = self._clock
            if not clock.running or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            around = clock.switch(clock.account(rank_wait_in(clock.current.phase)))
            try:
                return function(*args, **kwargs)
            finally:
                clock.switch(around)

        return waiting

    def around_backward(self, backward: _Function) -> _Function:
        """Return ``Strategy.backward`` with the wait at its end, if there is one, booked as such."""

        def timed(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._ended = False
            hook = None if self.unseen or not self._clock.running else self._hooked(loss)
            try:
                return backward(loss, *args, **kwargs)
            finally:
                if hook is not None:
                    hook.remove()
                    self.unseen = self.unseen or not self._ended

        return timed

    def _hooked(self, loss: Any) -> Any:
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return None
        return loss.register_hook(self._begins)  # type: ignore[no-untyped-call]

    def _begins(self, gradient: torch.Tensor) -> None:
        """Autograd begins; an error here would be one of the user's backward."""
        queue = compat.queue_in_backward()
        if queue is None:
            return

        def computed() -> None:
            self._ended = True
            around = self._clock.switch(self._clock.account(rank_wait_in(self._clock.current.phase)))
            queue(lambda: self._clock.switch(around))  # comes after DistributedDataParallel's

        queue(computed)
