"""held_lock: C code holds Python's lock (the GIL), so no Python thread can run.

By a timer of faulthandler, which needs no lock: it writes all stacks where no thread of Python could stop it.
"""

from __future__ import annotations

from lightning_gpu_tools.advice.stall_cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_examples import a_stack
from lightning_gpu_tools.advice.stall_words import where
from lightning_gpu_tools.training.phases import FORWARD
from lightning_gpu_tools.training.stall_facts import StallFacts


def find(facts: StallFacts) -> Explanation | None:
    if not facts.lock_is_held:
        return None
    in_which = f" The training thread was{where(facts.stack)}." if facts.stack else ""
    return Explanation(
        "held_lock",
        f"C code held Python's lock (the GIL), so no thread of Python ran.{in_which}",
        "Look at that line. C code that takes long has to release the lock: ctypes.CDLL instead of PyDLL, nogil in "
        "Cython, gil_scoped_release in pybind11.",
    )


CAUSE = StallCause(
    name="held_lock",
    seen_as="nothing of the program runs, also no other thread: C code holds Python's lock (the GIL)",
    change="the line that is named: have its C code release the lock (`ctypes.CDLL` instead of `PyDLL`, `nogil` in "
    "Cython, `gil_scoped_release` in pybind11)",
    find=find,
    verified_on="cpu",
    sick=StallFacts(phase=FORWARD, stack=a_stack("train.py:tokenize"), lock_is_held=True),
    healthy=StallFacts(phase=FORWARD, stack=a_stack("train.py:tokenize")),
)
