"""Marks of a GPU's waits for other ranks within backward, where DistributedDataParallel sends a bucket of gradients.

From torch 2.15 on, a GPU waits for each bucket as soon as it is sent, before it computes the next gradients. Earlier
releases let it wait for all buckets at the end of backward. DDP sends a bucket in a hook of the weight whose gradient
completes it. One hook of ours runs before that one, and one after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.phases import BACKWARD, RANK_WAIT_IN_STEP

_SETTLED = 1  # backwards that send gradients, until DDP has rebuilt its buckets
_MAX_LEARNED = 3  # our default: passes to learn from, because hooks on all weights take time


class BucketWaits:
    """The weights that complete buckets, learned in one backward, and marks at them in sampled ones.

    ``enter`` marks the start of another phase on the GPU's timeline.
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
                elif self._synced >= _SETTLED:
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
