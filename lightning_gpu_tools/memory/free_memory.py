"""Free GPU memory after an error, in a notebook or at a prompt."""

import builtins
import gc
import sys
import traceback
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.units import format_bytes, printable


@dataclass(frozen=True, repr=False)
class FreedMemory:
    """The result of :func:`free_memory`. As a string, it is a text of a few lines.

    Attributes:
        freed_bytes: Memory that torch has returned on all GPUs, in bytes.
        allocated_bytes: Size of the tensors that remain on all GPUs, in bytes.
        released: What was released, such as ``("the traceback of OutOfMemoryError", "Out")``.
        held: Bytes by variable that leads to remaining tensors, largest first. What is shared counts for the smallest.
    """

    freed_bytes: int
    allocated_bytes: int
    released: tuple[str, ...]
    held: Mapping[str, int]

    def __repr__(self) -> str:
        lines = [
            f"Freed {format_bytes(self.freed_bytes)} of GPU memory.",
            f"Released: {', '.join(self.released) or 'nothing, because no error and no result was stored'}.",
        ]
        shown = [(name, size) for name, size in self.held.items() if size][:8]  # our default
        elsewhere_bytes = self.allocated_bytes - sum(size for _, size in shown)
        if elsewhere_bytes > 0:
            shown.append(("elsewhere", elsewhere_bytes))
        if shown:
            lines.append("Still held:")
            lines += [f"{format_bytes(size):>10}  {name}" for name, size in shown]
        if self.held:
            lines.append(f"To free the memory of variables: del {', '.join(self.held)}")
        return "\n".join(lines)


def free_memory() -> FreedMemory:
    """Free the GPU memory that a stored error keeps in use, in a notebook, at a prompt, or in an ``except`` block.

    After an error, Python and IPython keep its traceback, and with it the local variables of each function in it: the
    batch, activations, the loss. This function clears these variables and releases the error. It also releases the
    stored results of cells (``Out``, ``_``), collects garbage, and empties torch's cache.

    Your own variables and functions that are still running are kept. Afterward, ``%debug``, ``%tb`` and ``pdb.pm()``
    have no traceback of the last error. This never starts CUDA.
    """
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
    reserved_bytes = sum(torch.cuda.memory_reserved(i) for i in gpus)
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    released = (*_forget_errors(shell), *_forget_results(shell))
    gc.collect()
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:  # as after a failed assertion of a kernel
        raise RuntimeError("CUDA failed, and cannot free memory until this process ends. Restart it.") from error
    return FreedMemory(
        freed_bytes=reserved_bytes - sum(torch.cuda.memory_reserved(i) for i in gpus),
        allocated_bytes=sum(torch.cuda.memory_allocated(i) for i in gpus),
        released=released,
        held=_held(shell) if gpus else {},
    )


def _forget_errors(shell: Any) -> list[str]:
    """Clear the variables in the tracebacks of stored errors, release the errors, and return their names."""
    chain = [getattr(sys, "last_value", None), sys.exc_info()[1]]
    names = [f"the traceback of {printable(type(error).__name__)}" for error in chain if error is not None]
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    if shell is not None:
        shell.last_execution_result = shell.InteractiveTB.tb = None
    cleared = set()
    while chain:
        error = chain.pop()
        if error is None or id(error) in cleared:
            continue
        cleared.add(id(error))
        chain += [error.__cause__, error.__context__]
        for frame, _ in traceback.walk_tb(error.__traceback__):
            with suppress(RuntimeError):  # it is still running
                frame.clear()
                _ = frame.f_locals  # empties the copy that Python before 3.13 keeps
    return list(dict.fromkeys(names))


def _forget_results(shell: Any) -> list[str]:
    """Release the stored results of a notebook or prompt, and return their names."""
    if shell is None:
        return ["_"] if hasattr(sys, "ps1") and vars(builtins).pop("_", None) is not None else []
    if not shell.displayhook.do_full_cache or not shell.user_ns.get("_oh"):
        return []
    shell.displayhook.flush()  # as `%reset out` does
    shell.user_ns_hidden.update({"_": "", "__": "", "___": ""})  # which flush() leaves out
    return ["Out"]


def _held(shell: Any) -> dict[str, int]:
    """Return the bytes on GPUs by name of the user's variables that lead to tensors there."""
    variables = dict(vars(sys.modules["__main__"]))
    if shell is not None:
        variables = {name: value for name, value in shell.user_ns.items() if name not in shell.user_ns_hidden}
    namespaces = {id(vars(module)) for module in list(sys.modules.values()) if issubclass(type(module), ModuleType)}
    found = {name: _storages(value, {id(variables), *namespaces}) for name, value in variables.items()}
    held: dict[str, int] = {}
    known: set[int] = set()
    for name in sorted(found, key=lambda name: sum(found[name].values())):
        if found[name]:
            held[name] = sum(size for address, size in found[name].items() if address not in known)
            known |= found[name].keys()
    return dict(sorted(held.items(), key=lambda item: -item[1]))


def _storages(root: object, namespaces: Container[int]) -> dict[int, int]:
    """Return the sizes of the storages on GPUs to which an object leads, by address; no further than modules."""
    storages: dict[int, int] = {}
    seen: dict[int, object] = {}  # keeps what is made on the way, so that nothing else gets the same identity
    stack: list[Any] = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or id(item) in namespaces or issubclass(type(item), (ModuleType, type)):
            continue
        seen[id(item)] = item
        stack += filter(gc.is_tracked, gc.get_referents(item))
        if issubclass(type(item), torch.Tensor):
            with suppress(Exception):  # no storage, as inside torch.func, or any error of a subclass: it is "elsewhere"
                stack += [item.grad_fn, item.grad if item.is_leaf else None]
                if item.is_cuda:
                    storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif hasattr(type(item), "next_functions"):  # a node of an autograd graph
            stack += [function for function, _ in item.next_functions]
            stack += compat.saved_by(item)
    return storages
