"""Search for the variables, attributes and running functions that hold tensors on GPUs."""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
from collections import deque
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch

from lightning_gpu_tools.collector import frames_kept
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.memory_holdings import plain_tensors
from lightning_gpu_tools.units import printable

# Our defaults: holders without a variable that are searched for, and objects on the way to each. Finding the holders of
# one object takes about 0.1 s, because it reads every object of the process.
_MAX_SEARCHED, _MAX_SEARCHES = 3, 8

_CONTAINERS = (dict, list, tuple, set, deque, CellType)
_Storages = dict[tuple[int, int], int]  # sizes in bytes, by GPU and address


@dataclass(frozen=True)
class MemoryHolder:
    """A holder of tensors on GPUs.

    Attributes:
        name: The variable, or all variables of the same object (``"model, net"``); otherwise a description, such as
            ``"attribute cache of Sampler"``.
        type_name: Type of the object, such as ``"GPT"``.
        size_bytes: Size in bytes of the tensors on all GPUs, including those in their graphs. A tensor with several
            holders counts for a module, or else for the smallest holder. 0 if other holders account for all of it.
        is_variable: Whether it is a variable of the notebook or program, which ``del`` removes.
    """

    name: str
    type_name: str
    size_bytes: int
    is_variable: bool


def holds_gpu_memory(value: object) -> bool:
    """Return whether an object refers to a tensor on a GPU, directly or not."""
    return bool(_reach(value, (), _modules())[0])


def find_holders(variables: Mapping[str, object]) -> list[MemoryHolder]:
    """Return the variables that hold tensors on GPUs, then other holders of tensors that no variable accounts for.

    These are the local variables of running functions, and then the holders of the largest tensors that remain.
    """
    passed, known = {id(variables), *_modules()}, _Storages()
    found = _named(variables, passed, known, are_variables=True)
    if _largest_unnamed(known) is not None:
        found += _named(_running_locals(), passed, known, are_variables=False)
    for _ in range(_MAX_SEARCHED):
        tensor = _largest_unnamed(known)
        if tensor is None:
            break
        name, value = _holder_of(tensor) or ("", tensor)
        own = _new(_reach(value, (), passed)[0] | dict(_storages(tensor)), known)
        if name:
            found.append(MemoryHolder(name, _type_name(value), sum(own.values()), is_variable=False))
    return found


def _named(
    variables: Mapping[str, object], passed: set[int], known: _Storages, *, are_variables: bool
) -> list[MemoryHolder]:
    """Return the variables that hold tensors, the largest first. Add the tensors to ``known``, values to ``passed``."""
    names: dict[int, list[str]] = {}
    values = {}
    for name, value in variables.items():
        if gc.is_tracked(value) and id(value) not in passed:
            names.setdefault(id(value), []).append(name)
            values[id(value)] = value
    reached = {key: _reach(value, values, passed) for key, value in values.items()}
    holding = {key for key, (storages, _) in reached.items() if storages}
    while more := {key for key in reached.keys() - holding if reached[key][1] & holding}:
        holding |= more  # a Trainer that leads to a model keeps it alive
    passed |= values.keys()
    found = []

    def order(key: int) -> tuple[bool, int]:
        return not issubclass(type(values[key]), torch.nn.Module), sum(reached[key][0].values())

    for key in sorted(holding, key=order):
        name = printable(", ".join(names[key]) if are_variables else names[key][0], 200)
        size_bytes = sum(_new(reached[key][0], known).values())
        found.append(MemoryHolder(name, _type_name(values[key]), size_bytes, are_variables))
    return sorted(found, key=lambda one: -one.size_bytes)


def _new(storages: _Storages, known: _Storages) -> _Storages:
    """Return the storages that are not in ``known``, and add them to it."""
    new = {place: size for place, size in storages.items() if place not in known}
    known |= new
    return new


def _type_name(value: object) -> str:
    return printable(type(value).__name__)


def _modules() -> dict[int, ModuleType]:
    """Return all modules by the identity of their namespace, through which each function would lead to everything."""
    return {id(vars(one)): one for one in list(sys.modules.values()) if issubclass(type(one), ModuleType)}


def _reach(root: object, borders: Container[int], passed: Container[int]) -> tuple[_Storages, set[int]]:
    """Return the storages to which an object leads, and the ``borders`` at which the search ended."""
    storages, met = _Storages(), set[int]()
    seen: dict[int, object] = {}  # keeps what is made on the way, so that nothing else gets the same identity
    stack = [root]
    with torch._C.DisableTorchFunctionSubclass():
        while stack:
            one = stack.pop()
            if id(one) in seen or (id(one) in passed and one is not root) or issubclass(type(one), (ModuleType, type)):
                continue
            seen[id(one)] = one
            if id(one) in borders and one is not root:
                met.add(id(one))
                continue
            storages.update(_storages(one))
            stack += _referents(one)
    return storages, met


def _referents(one: Any) -> Iterator[object]:
    yield from filter(gc.is_tracked, gc.get_referents(one))
    if issubclass(type(one), torch.Tensor):  # not isinstance, which asks proxies for the class of what they stand for
        try:
            yield one.grad_fn
        except RuntimeError:  # a view whose base was changed in place
            return
        if one.is_leaf:
            yield one.grad
    elif hasattr(type(one), "next_functions"):
        yield from (function for function, _ in one.next_functions)
        yield from compat.saved_by(one)


def _storages(value: object) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield place and size of the storages of a tensor on GPUs; nothing for other objects."""
    if issubclass(type(value), torch.Tensor):
        try:
            for tensor in plain_tensors(value):
                storage = tensor.untyped_storage()
                if storage.device.type == "cuda" and storage.nbytes():
                    yield (storage.device.index, storage.data_ptr()), storage.nbytes()
        except Exception:  # noqa: BLE001 - no storage, as inside torch.func, or any error of a subclass: it is "elsewhere"
            return


def _largest_unnamed(known: Container[tuple[int, int]]) -> torch.Tensor | None:
    """Return the largest tensor on a GPU whose storages are not in ``known``."""
    largest, largest_bytes = None, 0
    with torch._C.DisableTorchFunctionSubclass():
        for one in gc.get_objects():
            if issubclass(type(one), torch.Tensor):
                size_bytes = sum(size for place, size in _storages(one) if place not in known)
                if size_bytes > largest_bytes:
                    largest, largest_bytes = one, size_bytes
    return largest


def _running_locals() -> dict[str, object]:
    """Return the local variables of all functions that are running, by description."""
    found: dict[str, object] = {}
    with frames_kept():
        for innermost in sys._current_frames().values():
            for frame, line in traceback.walk_stack(innermost):
                if not _is_ours(frame):
                    place = f"the running {_in_code(frame.f_code, line)}"
                    found |= {f"local variable {name} of {place}": value for name, value in _locals(frame).items()}
    del innermost  # this may be the frame of this call, which would hold itself and the result
    return found


def _locals(frame: FrameType) -> dict[str, object]:
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a module or class, whose namespace this would be
        return {}
    current = frame.f_locals
    found = dict(current)
    # Until Python 3.12 it is a copy that the frame keeps. If no one else uses it, that is one of three references.
    if sys.version_info < (3, 13) and sys.getrefcount(current) == 3:
        current.clear()
    return found


def _in_code(code: CodeType, line: int) -> str:
    return f"{code.co_name} ({printable(Path(code.co_filename).name)}:{line})"


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("lightning_gpu_tools.")


def _holder_of(tensor: object) -> tuple[str, object] | None:
    """Describe the holder of a tensor, even one in containers, and return its part; ``None`` if there is none."""
    queue: deque[tuple[object, object]] = deque([(tensor, None)])  # containers, each with the part that led to it
    modules, seen = _modules(), {id(queue)}
    for _ in range(_MAX_SEARCHES):
        if not queue:
            break
        entry = held, part = queue.popleft()
        seen |= {id(entry), id(held), *map(id, queue)}
        for holder in gc.get_referrers(held):
            if id(holder) in seen or (issubclass(type(holder), FrameType) and _is_ours(holder)):
                continue
            if id(holder) in modules:
                return _described(modules[id(holder)], holder, held)
            if not issubclass(type(holder), _CONTAINERS):
                return _described(holder, held, part)
            queue.append((holder, held))
    return None


def _described(holder: Any, held: object, part: object) -> tuple[str, object]:
    """Describe the holder of an object, or if that is the namespace of the holder, of a part of it."""
    kind = type(holder)
    if issubclass(kind, FunctionType):
        return f"function {_in_code(holder.__code__, holder.__code__.co_firstlineno)}", holder
    frame = holder.gi_frame if issubclass(kind, GeneratorType) else holder
    is_frame, is_class = issubclass(type(frame), FrameType), issubclass(kind, type)
    namespace: Mapping[str, object] = {}
    with suppress(AttributeError):  # an object with slots; its __getattr__ is not asked
        namespace = frame.f_locals if is_frame else object.__getattribute__(holder, "__dict__")
    value = part if namespace is held or is_class else held
    name = printable(next((name for name, one in namespace.items() if one is value), "?"))
    if is_frame:
        return f"local variable {name} of {_in_code(frame.f_code, frame.f_lineno)}", value
    if issubclass(kind, ModuleType):
        return f"{printable(holder.__name__)}.{name}", value
    return f"attribute {name} of {printable((holder if is_class else kind).__qualname__)}", value
