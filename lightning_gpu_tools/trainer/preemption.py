"""An agreement of all ranks on the point at which a run that is asked to stop saves and ends.

A point is the end of a training or validation batch: (training batches, validation batches since). The training thread
only notes the points that it reaches. With several ranks, a thread of each rank watches for the request of any rank,
publishes the last point that its rank has reached, and takes the highest of all. The first point after that is the same
on all ranks: a rank that comes to a point between its publication and the agreement waits for the agreement.
"""

import functools
import json
import math
import signal
import threading
from collections.abc import Callable
from typing import Any

from lightning_gpu_tools.background import BackgroundJobs
from lightning_gpu_tools.patches import Patches
from lightning_gpu_tools.trainer.families import family_of

_POLL_S = 0.25  # our default: a request may be this late, of the usual 30 s or more of grace
_AGREE_TIMEOUT_S = 20.0  # our default: a rank that has not answered by then is lost, and saving would hang
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """The signals that ask this run to stop, and the point at which it does. Ends with :meth:`close`.

    ``store`` is that of the ranks, if there are several.
    """

    def __init__(self, trainer: Any, store: Any, name: str) -> None:
        self.signal: int | None = None  # the one that this or another rank got, once the ranks have agreed
        self.requeue: Callable[[], object] | None = None  # saves and requeues the job, if SLURM has a signal for that
        self._trainer = trainer
        self._asked: int | None = None
        self._key = f"lightning_gpu_tools/stop/{name}"
        self._store = store
        self._reached = (0, 0)
        self._is_published = False
        self._agreed = threading.Event()
        self._last = (0, 0)  # the highest point that a rank had reached, once the ranks have agreed
        self._jobs = BackgroundJobs()
        self._patches = Patches()
        if store is not None:
            self._jobs.add("Watching for a request to stop", self._watch)

    def listen(self) -> None:
        """Take the signals over from Lightning, whose handlers broadcast or save at once, in the middle of a step."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals():
            current: Any = signal.getsignal(number)
            is_lightnings = callable(current) and family_of(type(current)) is not None
            is_free = number in _SIGNALS and current is signal.SIG_DFL  # not a user's own
            if current != self._ask and (number == signal.SIGTERM or is_lightnings or is_free):
                if is_lightnings and number != signal.SIGTERM:
                    self.requeue = functools.partial(current, number, None)
                get, set_to = functools.partial(signal.getsignal, number), functools.partial(signal.signal, number)
                self._patches.set_value(get, set_to, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        self._asked = number

    def _request(self) -> int | None:
        """Return the signal that this rank got, from this or, before :meth:`listen`, from Lightning's handler."""
        return self._asked or (signal.SIGTERM if self._trainer.received_sigterm else None)

    def is_due(self, point: tuple[int, int]) -> bool:
        """Return whether the run stops at this point, which has been reached."""
        if self._store is None:
            self.signal = self._request()
            return self.signal is not None
        # Set first, and published first in the thread: either the thread sees this point, or this one waits for it.
        self._reached = point
        return self._is_published and self._agreed.wait(_AGREE_TIMEOUT_S) and point > self._last

    def _watch(self) -> float:
        """Publish and read points once a rank has been asked. Runs in a thread."""
        store, flag, request = self._store, f"{self._key}/flag", self._request()
        if request is not None and not self._is_published:
            store.set(flag, str(request))
        if not store.check([flag]):
            return _POLL_S
        if not self._is_published:
            self._is_published = True
            store.set(f"{self._key}/{self._trainer.global_rank}", json.dumps(self._reached))
        keys = [f"{self._key}/{rank}" for rank in range(self._trainer.world_size)]
        if not store.check(keys):
            return _POLL_S / 10
        self._last = max(tuple(json.loads(value)) for value in store.multi_get(keys))
        self.signal = int(store.get(flag))
        self._agreed.set()
        return math.inf

    def close(self) -> None:
        """Put the signal handlers back."""
        self._jobs.close()
        self._patches.undo()
