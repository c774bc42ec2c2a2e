"""Wrappers come off in any order and leave nothing behind; stacks are read while the collector does its worst."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, call

import pytest

from lightning_gpu_tools.patches import Patches, frames_kept


class Owner:
    def method(self) -> list[str]:
        return []


def wrapped(owner: object, count: int) -> list[Patches]:
    """Wrap the method ``count`` times, each time to add a number to what it returns."""

    def naming(name: str) -> Callable[[Callable[..., list[str]]], Callable[..., list[str]]]:
        return lambda method: lambda *args: [name, *method(*args)]

    wrappers = [Patches() for _ in range(count)]
    for number, one in enumerate(wrappers):
        one.put(owner, "method", naming(str(number)))
    return wrappers


@pytest.mark.parametrize("is_class", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_wrappers_come_off_in_any_order(is_class: bool, order: tuple[int, ...]) -> None:
    owner: Any = type("Own", (Owner,), {"method": Owner.method}) if is_class else Owner()
    call_it = (lambda: owner().method()) if is_class else (lambda: owner.method())
    before = dict(vars(owner))
    wrappers, on = wrapped(owner, 3), ["2", "1", "0"]
    assert call_it() == on
    for number in order:
        wrappers[number].undo()
        on.remove(str(number))
        assert call_it() == on
    assert dict(vars(owner)) == before


def test_a_mock_of_the_users_is_as_before() -> None:
    owner = Mock()
    owner.method.return_value = []
    method = owner.method
    wrappers = wrapped(owner, 2)
    assert owner.method() == ["1", "0"]
    wrappers[0].undo()
    wrappers[1].undo()
    assert owner.method is method
    assert owner.method() == []
    assert owner.mock_calls == [call.method(), call.method()]


# A collection in the reading thread lets the main thread run, which returns from functions with few variables and calls
# others with many. Without the pause, Python 3.11 crashes within two seconds.
PROGRAM = """
import gc, sys, threading, time
from lightning_gpu_tools.training.stacks import frames_of

main, read = threading.get_ident(), []

def let_others_run(phase, info):
    if threading.get_ident() != main and phase == "stop":
        time.sleep(0.001)

class Cycle:
    def __init__(self):
        self.itself = self

def small(n):
    if n % 5 == 0:
        Cycle()
    return (large if n % 3 == 0 else small)(n - 1) if n else time.sleep(0)

variables = [f"v{i}" for i in range(60)]
exec(
    "def large(n):\\n"
    + "".join(f"    {one} = n\\n" for one in variables)
    + "    return ((small if n % 2 else large)(n - 1), " + ", ".join(variables) + ") if n else None"
)

def sample():
    while until_s > time.monotonic():
        read.append(len([frame.f_lineno for frame in frames_of(main)]))
        time.sleep(0.0005)

until_s = time.monotonic() + 3.0
gc.callbacks.append(let_others_run)
gc.set_threshold(200)
sys.setswitchinterval(0.0002)
thread = threading.Thread(target=sample)
thread.start()
while thread.is_alive():
    for depth in range(20, 57):
        (small if depth % 2 else large)(depth)
assert max(read) > 20
assert gc.isenabled()
print("sampled")
"""


def test_a_collection_meanwhile_does_not_crash() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=90)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "sampled\n", "")


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_as_before_also_in_a_child_forked_meanwhile(is_enabled: bool) -> None:
    (gc.enable if is_enabled else gc.disable)()
    try:
        with frames_kept():
            assert not gc.isenabled() or sys.version_info[:2] != (3, 11)
            child = os.fork()
            if child == 0:
                with frames_kept():  # which needs no lock of the parent
                    pass
                os._exit(gc.isenabled() != is_enabled)
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
