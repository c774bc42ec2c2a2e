"""Time limits for driver calls, which can hang and cannot be interrupted."""

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")

LIMIT_S = 5.0  # our default: a GPU answers in milliseconds, unless it is falling off the bus
# Our default: calls that answer within this time follow each other. Threads that call the driver at the same time take
# the interpreter's lock from each other: on 2 cores, 8 GPUs took 19 ms together, and 10 ms one after the other.
_ALONE_S = 0.005
OPENING_LIMIT_S = 60.0  # our default: without persistence mode, the driver takes seconds to wake up each GPU

_late: dict[Hashable, threading.Thread] = {}  # calls that have exceeded their limit; some may have returned since


def answers(calls: Mapping[_K, Callable[[], _T]], limit_s: float) -> dict[_K, _T]:
    """Call all functions at once, each in its own thread, and wait for at most ``limit_s``.

    Return the answers by key, without those of functions that have not returned. If an earlier call with the same key
    still hangs, the function is not called again. Raise the first error of a function, once all have returned or
    exceeded the limit.
    """
    answered: dict[_K, _T] = {}
    errors: list[BaseException] = []

    def call(key: _K) -> None:
        try:
            answered[key] = calls[key]()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            errors.append(error)

    running = {}
    for key in calls:
        if not is_late(key):
            running[key] = threading.Thread(target=call, args=(key,), name="lightning-gpu-tools-driver", daemon=True)
            running[key].start()
            running[key].join(_ALONE_S)
    until_s = time.monotonic() + limit_s
    for key, thread in running.items():
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive():
            _late[key] = thread
    if errors:
        raise errors[0]
    return dict(answered)  # a late call may still add its answer


def is_late(key: Hashable) -> bool:
    """Return whether a call with this key has exceeded its limit and has still not returned."""
    return key in _late and _late[key].is_alive()


def hangs() -> bool:
    """Return whether any call in this process has exceeded its limit and has still not returned."""
    return any(call.is_alive() for call in [*_late.values()])
