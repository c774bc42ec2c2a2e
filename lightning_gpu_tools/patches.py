"""The changes that the package makes in the user's process, and putting everything back."""

import functools
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import MethodType, ModuleType
from typing import Any

_Function = Callable[..., Any]


class _StandIn(functools.partial[Any]):
    """A replacement for a method, but not on copies. It is a ``partial``, because calling one adds no Python frame.

    A wrapper on top of it may be removed later, so a removed stand-in keeps calling the function below it.
    """

    owner: object
    name: str
    below: _Function | None  # the value that the owner itself had under this name
    is_off = False

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> tuple[_Function, tuple[object, ...]]:
        if isinstance(self.owner, ModuleType):  # cannot be pickled, unlike its function
            return functools.partial, (self.func, *self.args)
        return getattr, (self.owner, self.name)

    def take_off(self, function: _Function) -> None:
        self.__setstate__((function, (), {}, {**vars(self), "is_off": True}))  # type: ignore[attr-defined]
        if getattr(self.owner, self.name, None) is not self:
            return
        below = self.below
        while isinstance(below, _StandIn) and below.is_off:
            function, below = below.func, below.below
        if below is not None:
            setattr(self.owner, self.name, below)
            return
        with suppress(AttributeError):  # a later wrapper may have removed it
            delattr(self.owner, self.name)
        if getattr(self.owner, self.name, None) is None:  # a Mock does not restore a deleted attribute
            setattr(self.owner, self.name, function)


class Patches:
    """The changes that are in place."""

    def __init__(self) -> None:
        self.missing: list[str] = []  # Class.method that could not be wrapped
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: object, name: str, wrapper: Callable[[_Function], _Function]) -> bool:
        """Replace a method of one object, or of one reached through attributes: ``"fit_loop.epoch_loop.run"``.

        Returns whether there is such a method.
        """
        *_, method = steps = name.split(".")
        function: Any = owner
        for step in steps:
            owner, function = function, getattr(function, step, None)
            if function is None:
                missing = f"{type(owner).__name__}.{step}"
                if missing not in self.missing:
                    self.missing.append(missing)
                return False
        stand_in = _StandIn(wrapper(function))
        stand_in.owner, stand_in.name, stand_in.below = owner, method, _own(owner, method, function)
        setattr(owner, method, stand_in)
        self._undo.append(functools.partial(stand_in.take_off, function))
        return True

    def add_to(self, entries: list[Any], entry: Any) -> None:
        """Insert an entry at the beginning of a list of the program."""
        entries.insert(0, entry)

        def take_out() -> None:
            with suppress(ValueError):  # someone else has removed it
                entries.remove(entry)

        self._undo.append(take_out)

    def set_value(self, get: Callable[[], Any], set_to: Callable[[Any], object], value: object) -> None:
        """Change a setting of the program, to be put back unless someone else has changed it by then."""
        before = get()
        set_to(value)
        ours = get()

        def put_back() -> None:
            if get() == ours:
                set_to(before)

        self._undo.append(put_back)

    def at_undo(self, action: Callable[[], None]) -> None:
        """Call this too, to put back what was changed by a function of torch's own."""
        self._undo.append(action)

    def undo(self) -> None:
        """Put everything back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()


def _own(owner: object, method: str, function: _Function) -> _Function | None:
    """Return the value in an object's ``__dict__`` under a name; ``None`` if its class has the method.

    The ``__dict__`` is read only if necessary: afterwards, CPython no longer caches method lookups of this object, and
    Lightning calls these objects most.
    """
    if isinstance(function, _StandIn) and function.owner is owner and function.name == method:
        return function
    of_class = getattr(type(owner), method, None)
    if isinstance(function, MethodType) and function.__self__ is owner and function.__func__ is of_class:
        return None
    found: _Function | None = vars(owner).get(method)  # of a module or a class, or someone else's wrapper
    return found


def before(action: Callable[[], None], function: _Function) -> _Function:
    """Return a function that calls ``action``, then ``function``."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        action()
        return function(*args, **kwargs)

    return wrapped


def after(action: Callable[[], None], function: _Function) -> _Function:
    """Return a function that calls ``function`` and then, if that did not raise, ``action``."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        action()
        return result

    return wrapped


_lock = threading.RLock()  # a signal's handler, or a finalizer, may run in between
_pauses = 0  # that have begun and not ended, in all threads
_was_enabled = False  # before the first of them


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector until the last thread leaves this context.

    It takes half the time of creating many objects, and finds nothing.
    """
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses = max(0, _pauses - 1)  # 0: this is a child that was forked in between
            if not _pauses and _was_enabled:
                gc.enable()


def frames_kept() -> AbstractContextManager[None]:
    """Return a context in which ``sys._current_frames``, and ``f_back`` and ``f_locals`` of its frames, may be used.

    In Python 3.11, these create objects, which may start a collection, which may let another thread run. If that thread
    returns from its function meanwhile, the new object is written over memory of its next calls, and the process
    crashes. If a thread starts or ends meanwhile, it waits forever for a lock that ``sys._current_frames`` holds. Later
    releases collect only between bytecodes; in earlier ones, all frames are objects.
    """
    return collector_paused() if sys.version_info[:2] == (3, 11) else nullcontext()


def _begin_in_child() -> None:
    """End the pauses of threads that a forked child does not have."""
    global _lock, _pauses
    _lock = threading.RLock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_begin_in_child)
