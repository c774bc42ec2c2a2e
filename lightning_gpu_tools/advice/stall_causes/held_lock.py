"""held_lock: C code holds the GIL, so no Python thread can run.

A timer of faulthandler, which needs no GIL, writes all stacks unless a Python thread stops it in time.
"""

from __future__ import annotations

from lightning_gpu_tools.advice.cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_examples import a_stack
from lightning_gpu_tools.advice.stall_words import where
from lightning_gpu_tools.training.phases import FORWARD
from lightning_gpu_tools.training.stall_facts import StallFacts


def find(facts: StallFacts) -> Explanation | None:
    if not facts.lock_is_held:
        return None
    in_which = f" The training thread was{where(facts.stack)}." if facts.stack else ""
    check = "Check that line. " if facts.stack else ""
    return Explanation(
        f"C code held the GIL, so no Python thread ran.{in_which}",
        f"{check}Long-running C code has to release the GIL: ctypes.CDLL instead of PyDLL, nogil in Cython, "
        "gil_scoped_release in pybind11.",
    )


CAUSE = StallCause(
    says="no thread of the program runs: C code holds the GIL",
    change="release the GIL in the C code at the reported line (`ctypes.CDLL` instead of `PyDLL`, `nogil` in Cython, "
    "`gil_scoped_release` in pybind11)",
    find=find,
    verified_on="cpu",
    sick=StallFacts(phase=FORWARD, stack=a_stack("train.py:tokenize"), lock_is_held=True),
    healthy=StallFacts(phase=FORWARD, stack=a_stack("train.py:tokenize")),
)
