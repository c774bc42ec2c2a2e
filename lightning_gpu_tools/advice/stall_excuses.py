"""Reasons to not report a thread that makes no progress: compilers, debuggers and people."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.training.stall_facts import Frame

# torch.compile at work; its other files are on the stack while compiled code runs.
_COMPILES = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "torch/_inductor/async_compile.py",
    "torch/_inductor/select_algorithm.py",
    "torch/_inductor/runtime/triton_heuristics.py",
    "triton/compiler/",
)
_ASKS = ("/pdb.py", "/bdb.py", "pydevd", "debugpy", "/pudb/", "/ipdb/", "/prompt_toolkit/", "/ipykernel/")
_INNERMOST = 12  # our default, in calls


def is_excused(stack: Sequence[Frame]) -> bool:
    """Return whether a thread that seems to hang is compiling, or waiting for a person (debugger, notebook)."""
    files = [frame.file for frame in stack]
    if any(part in file for file in files for part in _COMPILES):
        return True
    # A notebook's kernel, or a debugger that is not at a breakpoint, is only at the outer end of the stack.
    users = [i for i, frame in enumerate(stack) if not frame.is_library]
    inner = [f"/{file}" for file in files[max([*users, len(files) - _INNERMOST, 0]) :]]
    return any(part in file for file in inner for part in _ASKS)
