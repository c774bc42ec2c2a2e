"""Free GPU memory after an error, in a notebook or at a prompt."""

from __future__ import annotations

import builtins
import gc
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch

from lightning_gpu_tools.training.memory_counters import read_memory
from lightning_gpu_tools.training.tensor_holders import MemoryHolder, find_holders, holds_gpu_memory
from lightning_gpu_tools.units import format_bytes, printable

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FRAMES = ("gi_frame", "cr_frame", "ag_frame")  # of generators, coroutines and asynchronous generators
_STORED_ERROR = ("last_type", "last_value", "last_traceback", "last_exc")  # of sys, whose docs list them
_MAX_SHOWN = 8  # our default: holders in the text


@dataclass(frozen=True)
class FreedGpu:
    """A GPU's memory before and after :func:`free_memory`, by torch's allocator.

    Attributes:
        index: Number of the GPU in torch, as in ``cuda:0``.
        allocated_before_bytes: Size of the tensors before, in bytes.
        reserved_before_bytes: Size of the tensors and of torch's cache before, in bytes.
        allocated_after_bytes: Size of the tensors afterward.
        reserved_after_bytes: Size of the tensors and of torch's cache afterward.
    """

    index: int
    allocated_before_bytes: int
    reserved_before_bytes: int
    allocated_after_bytes: int
    reserved_after_bytes: int


@dataclass(frozen=True, repr=False)
class FreedMemory:
    """The result of :func:`free_memory`. Its ``str`` and ``repr`` are a text of a few lines.

    Attributes:
        gpus: GPUs on which this process has used torch; empty if CUDA has not started.
        released: Objects that were released, such as ``("the traceback of OutOfMemoryError", "Out[7]")``.
        held: Holders of the remaining GPU memory: variables, largest first; then local variables of running functions;
            then at most three others.
        failure: CUDA error that keeps memory in use until the process ends; usually ``None``.
    """

    gpus: tuple[FreedGpu, ...] = ()
    released: tuple[str, ...] = ()
    held: tuple[MemoryHolder, ...] = ()
    failure: str | None = None

    @property
    def freed_bytes(self) -> int:
        """Memory that torch has returned on all GPUs, in bytes."""
        return sum(gpu.reserved_before_bytes - gpu.reserved_after_bytes for gpu in self.gpus)

    @property
    def elsewhere_bytes(self) -> int:
        """Memory without a known holder, in bytes: tensors of C++ code, and cuBLAS workspaces."""
        allocated_bytes = sum(gpu.allocated_after_bytes for gpu in self.gpus)
        return max(0, allocated_bytes - sum(holder.size_bytes for holder in self.held))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        if self.failure is not None:
            yield f"CUDA failed, and cannot free memory until this process ends. Restart it. ({self.failure})"
        elif not self.gpus:
            yield "torch uses no GPU memory in this process."
        for gpu in self.gpus:
            before, after = format_bytes(gpu.reserved_before_bytes), format_bytes(gpu.reserved_after_bytes)
            freed = format_bytes(gpu.reserved_before_bytes - gpu.reserved_after_bytes)
            yield f"Freed {freed} on GPU {gpu.index} ({before} -> {after} reserved)."
        yield f"Released: {', '.join(self.released) or 'nothing, because no error and no result on a GPU was stored'}."
        counted = [(f"{one.name} ({one.type_name})", one.size_bytes) for one in self.held if one.size_bytes]
        shown = counted[:_MAX_SHOWN]
        if others := counted[_MAX_SHOWN:]:
            shown.append((f"{len(others)} others", sum(size for _, size in others)))
        if self.elsewhere_bytes:
            shown.append(("elsewhere", self.elsewhere_bytes))
        if shown:
            yield "Still held:"
            yield from (f"{format_bytes(size):>10}  {name}" for name, size in shown)
        if variables := [one.name for one in self.held if one.is_variable]:
            yield f"To free the memory of variables: del {', '.join(variables)}"


def free_memory() -> FreedMemory:
    """Free the GPU memory that a stored error keeps in use, in a notebook, at a prompt, or in an ``except`` block.

    After an error, Python and IPython keep its traceback, and with it the local variables of each function in it: the
    batch, activations, the loss. This function clears these variables and releases the error. It also releases stored
    results (``Out``, ``_``) that hold tensors on a GPU. Then it collects garbage, empties torch's cache, and searches
    for the holders of the remaining GPU memory.

    Your own variables, functions that are still running, and results without a GPU tensor are kept. Afterward,
    ``%debug``, ``%tb`` and ``pdb.pm()`` have no traceback of the last error. This never starts CUDA.

    Returns:
        The memory freed on each GPU, and the holders of the rest. ``print`` shows it as a few lines of text.

    Example:
        ``trainer.fit(model)`` has failed with ``OutOfMemoryError``. In the next cell::

            from lightning_gpu_tools import free_memory
            free_memory()
    """
    before = _readings()
    shell = _ipython()
    released = (*_forget_errors(shell), *_forget_results(shell))
    gc.collect()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return FreedMemory(released=released)

    failure = None
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:  # as after a failed assertion of a kernel
        failure = printable(str(error).partition("\n")[0], 200)
    after = _readings()
    gpus = tuple(FreedGpu(i, *before[i], *after[i]) for i in sorted(before.keys() & after.keys()))
    return FreedMemory(gpus, released, tuple(find_holders(_variables(shell))), failure)


def _readings() -> dict[int, tuple[int, int]]:
    """Return the bytes in tensors, and those reserved, of each GPU that this process uses."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    read = {}
    with suppress(RuntimeError):  # a custom allocator without counters
        read = {i: read_memory(torch.device("cuda", i)) for i in range(torch.cuda.device_count())}
    return {i: (one.allocated_bytes, one.reserved_bytes) for i, one in read.items() if one and one.peak_reserved_bytes}


def _ipython() -> Any:
    """Return the running IPython, including a notebook's; ``None`` without one."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def _forget_errors(shell: Any) -> list[str]:
    """Clear the variables in the tracebacks of stored errors, release the errors, and return their names."""
    errors = [getattr(sys, name, None) for name in _STORED_ERROR] + [sys.exc_info()[1]]
    for name in _STORED_ERROR:
        if hasattr(sys, name):
            delattr(sys, name)
    if shell is not None:
        shell.last_execution_result = shell.InteractiveTB.tb = None
    cleared: set[int] = set()
    for error in errors:
        _clear_frames(error, cleared)
    names = dict.fromkeys(type(error).__name__ for error in errors if isinstance(error, BaseException))
    return [f"the traceback of {printable(name)}" for name in names]


def _clear_frames(error: object, cleared: set[int]) -> None:
    """Clear the variables in a traceback, or in all tracebacks of an exception and its chain."""
    stack = [error]
    while stack:
        one = stack.pop()
        if id(one) in cleared:
            continue
        cleared.add(id(one))
        if isinstance(one, BaseException):
            parts = getattr(one, "exceptions", None)  # of an ExceptionGroup, from Python 3.11 on
            stack += [one.__traceback__, one.__cause__, one.__context__, *(parts if isinstance(parts, tuple) else ())]
        elif isinstance(one, TracebackType):
            for frame, _ in traceback.walk_tb(one):
                if not _is_suspended(frame):
                    with suppress(RuntimeError):  # it is still running
                        frame.clear()
                        _ = frame.f_locals  # empties the copy that Python before 3.13 keeps


def _is_suspended(frame: FrameType) -> bool:
    """Return whether a frame belongs to a suspended generator or coroutine, which clearing ends before Python 3.13."""
    return bool(frame.f_code.co_flags & _SUSPENDABLE) and any(
        getattr(owner, name, None) is frame for owner in gc.get_referrers(frame) for name in _FRAMES
    )


def _forget_results(shell: Any) -> list[str]:
    """Release the stored results of cells that hold GPU memory, and return their names."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    if shell is None:
        if not holds_gpu_memory(vars(builtins).get("_")):
            return []
        del builtins._  # type: ignore[attr-defined]
        return ["_"]
    hook, results = shell.displayhook, shell.user_ns.get("_oh", {})
    stored = {f"_{number}": value for number, value in results.items()}
    stored |= {name: getattr(hook, name) for name in ("_", "__", "___")}
    dropped = {name: value for name, value in stored.items() if holds_gpu_memory(value)}
    for name, value in dropped.items():
        if hasattr(hook, name):
            setattr(hook, name, "")  # as IPython's own `%reset out` does
        for namespace in (shell.user_ns, shell.user_ns_hidden):
            if namespace.get(name) is value:  # not the user's own variable of this name
                namespace[name] = ""
    numbers = [number for number in results if f"_{number}" in dropped]
    for number in numbers:
        del results[number]
    return [f"Out[{number}]" for number in numbers]


def _variables(shell: Any) -> dict[str, object]:
    """Return the variables of the program or notebook, without those that IPython hides."""
    variables = dict(vars(sys.modules["__main__"]))
    if shell is not None:
        variables |= shell.user_ns
        hidden = shell.user_ns_hidden
        variables = {name: one for name, one in variables.items() if hidden.get(name, hidden) is not one}
    return variables
