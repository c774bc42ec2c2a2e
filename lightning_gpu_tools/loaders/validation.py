"""Workers for a validation loader, in proportion to what the training loader got, as long as they help."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from lightning_gpu_tools.loaders.switch import Switch
from lightning_gpu_tools.training.run_measurements import LoaderSettings


class ValidationLoader:
    """Gives a loader more workers once it has been iterated with its own settings, and takes them away if it is slower.

    Compared is the time for which a whole run waited for batches, the start of the workers included. Nothing is changed
    in mid-run.

    Args:
        switch: The loader.
    """

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._target: LoaderSettings | None = None
        self._batches, self._wait_s = 0, 0.0
        self._before: tuple[int, float] | None = None
        self._judged = False
        switch.listener = self

    def move_to(self, switch: Switch) -> None:
        """Go on with another loader in the place of the one so far."""
        switch.follow(self._switch)
        switch.listener = self
        self._switch = switch

    def forget(self) -> None:
        """Drop what was measured so far: it was a sanity check, not a whole run."""
        self._batches, self._wait_s = 0, 0.0

    def scale(self, found: LoaderSettings) -> None:
        """Take over the settings that were found for training, in proportion to the sizes of the batches."""
        users = self._switch.users
        share = (users.batch_size or 1) / (found.batch_size or users.batch_size or 1)
        count = math.ceil(found.num_workers * min(1.0, share))
        if count > users.num_workers:
            prefetch_factor = max(users.prefetch_factor or 0, found.prefetch_factor or 2)
            self._target = replace(users, num_workers=count, prefetch_factor=prefetch_factor)

    def on_epoch_start(self) -> None:
        """Compare the run before this one, and choose the settings of this one."""
        last, (self._batches, self._wait_s) = (self._batches, self._wait_s), (0, 0.0)
        if self._before is None:
            if self._target is not None and last[0]:
                self._before = last
                self._switch.use(self._target, now=False)
        elif not self._judged and last[0] == self._before[0]:
            self._judged = True
            if last[1] >= self._before[1]:
                self._switch.use(self._switch.users, now=False)

    def on_batch(self, batch: Any, wait_s: float, since_last_s: float | None) -> None:
        """Add up the waits."""
        self._batches += 1
        self._wait_s += wait_s

    def on_fault(self, settings: LoaderSettings, error: Exception) -> None:
        """Leave it at the user's own settings, which are on again."""
        self._judged = True
