"""Accounting of this rank's waits for other ranks: on the host, in CPU collectives and barriers.

The host only queues GPU collectives. On a GPU, buckets and the end of backward are marked on its own timeline.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.gpu_timeline import GpuTimeline
from lightning_gpu_tools.training.phases import BACKWARD, RANK_WAIT_IN_STEP, rank_wait_in
from lightning_gpu_tools.training.step_clock import StepClock
from lightning_gpu_tools.training.stopwatch import Account

_SKIPPED = 1  # backwards that send gradients, until DDP has rebuilt its buckets
_MAX_LEARNED = 3  # our default: passes to learn from, because hooks on all weights take time

_Function = Callable[..., Any]


class RankWaits:
    """Separation of waits for other ranks from the phases of a clock, on the thread that creates this object.

    DistributedDataParallel waits in an autograd callback after the graph has run. Autograd calls callbacks in order,
    so a callback that is queued at the loss, before all others, marks the end of this rank's computation.
    """

    def __init__(self, clock: StepClock, weights: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        """``weights`` returns the trained weights."""
        self.gpu: GpuTimeline | None = None  # marks the same waits on the GPU's own timeline
        self.unseen = False  # whether a backward's phase may include waiting
        self._clock = clock
        self._thread = threading.get_ident()
        self._accounts: dict[Account, Account] = {}
        self._around = clock.current
        self._has_computed = False
        self._queue = compat.find(compat.QUEUE_IN_BACKWARD)
        self._buckets = BucketWaits(weights, self._enter)

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
            if self.unseen or not self._clock.running:
                return backward(*args, **kwargs)
            self._has_computed = False
            node = getattr(args[0] if args else None, "grad_fn", None)
            hook = None if node is None else node.register_prehook(self._begins)
            gpu = self.gpu
            marked = nullcontext() if gpu is None else self._buckets.around_backward(is_sampled=gpu.sample is not None)
            try:
                with marked:
                    return backward(*args, **kwargs)
            finally:
                if hook is not None:
                    hook.remove()
                self.unseen = not self._has_computed

        return timed

    @property
    def unseen_on_gpu(self) -> bool:
        """Whether the GPU's time in a backward may include waiting."""
        return self.unseen or self._buckets.unseen

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


class BucketWaits:
    """Marks of a GPU's waits within backward, where DistributedDataParallel sends a bucket of gradients.

    From torch 2.15 on, a GPU waits for each bucket as soon as it is sent, before it computes the next gradients.
    Earlier releases let it wait for all buckets at the end of backward. DDP sends a bucket in a hook of the weight
    whose gradient completes it. These weights are learned in one backward. In sampled ones, one hook of ours runs
    before DDP's, and one after it. ``enter`` marks the start of another phase on the GPU's timeline.
    """

    def __init__(self, weights: Callable[[], Iterable[torch.Tensor]], enter: Callable[[str], None]) -> None:
        self._weights = weights
        self._enter = enter
        self._last: list[torch.Tensor] = []  # of each bucket
        self._synced = self._learned = 0  # backwards that have sent gradients, and those learned from
        self._sent = 0  # collectives until the last hook of ours
        self._marked = 0  # collectives between marks in this backward
        self._missed = False

    @property
    def unseen(self) -> bool:
        """Whether a sampled backward includes waits without a mark."""
        return self._missed and compat.waits_for_each_bucket()

    @contextmanager
    def around_backward(self, *, is_sampled: bool) -> Iterator[None]:
        """Return a context for backward: it marks the waits if the step is sampled, and else learns the weights."""
        if not is_sampled and (self._last or self._learned == _MAX_LEARNED):
            yield
            return
        before = self._sent = compat.collectives_started()
        self._marked = 0
        with ExitStack() as hooks:
            try:
                if is_sampled:
                    self._mark(hooks)
                elif self._synced >= _SKIPPED:
                    self._learned += 1
                    self._learn(hooks)
            except Exception:  # noqa: BLE001 - weights that allow no hooks are no reason to stop training
                self._learned, self._last = _MAX_LEARNED, []
                hooks.close()
            yield
        sent = compat.collectives_started() - before
        self._synced += sent > 0
        if is_sampled:
            # In addition to buckets, DDP may send a bitmap of the used weights.
            self._missed = sent - self._marked > bool(self._last)
            if self._missed:
                self._last = []

    def _mark(self, hooks: ExitStack) -> None:
        def will_send(_: object) -> None:
            self._sent = compat.collectives_started()
            self._enter(RANK_WAIT_IN_STEP)

        def has_sent(*_: object) -> None:
            self._marked += compat.collectives_started() - self._sent
            self._enter(BACKWARD)

        for weight in self._last:
            register: Any = weight.register_post_accumulate_grad_hook  # untyped in torch
            hooks.callback(register(will_send).remove)
            hooks.callback(compat.accumulation(weight).register_hook(has_sent).remove)

    def _learn(self, hooks: ExitStack) -> None:
        def may_have_sent(weight: torch.Tensor, *_: object) -> None:
            before, self._sent = self._sent, compat.collectives_started()
            if self._sent > before:
                self._last.append(weight)

        for weight in self._weights():
            if weight.requires_grad and weight.is_leaf:
                hooks.callback(compat.accumulation(weight).register_hook(partial(may_have_sent, weight)).remove)
