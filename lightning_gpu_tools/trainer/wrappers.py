"""Puts wrappers on the methods of single objects, and takes them off again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_Function = Callable[..., Any]


class _StandIn(functools.partial[Any]):
    """Stands on an object in the place of one of its methods; a copy or a pickle of the object has the method again.

    A ``partial``, because calling one adds no Python frame: some are called in every step.

    Attributes:
        owner: The object.
        name: Of the method.
    """

    owner: object
    name: str

    def __reduce__(self) -> tuple[_Function, tuple[object, str]]:
        return getattr, (self.owner, self.name)


class Wrappers:
    """The wrappers that were put on.

    Attributes:
        missing: What was to be wrapped and is not there, as ``Class.method``.
    """

    def __init__(self) -> None:
        self.missing: list[str] = []
        self._undo: list[Callable[[], object]] = []

    def put(self, owner: object, name: str, wrapper: Callable[[_Function], _Function]) -> None:
        """Replace a method of one object alone by the function that the wrapper makes of it.

        Args:
            owner: The object, or one that leads to it.
            name: Of the method, behind the attributes that lead to it: ``"fit_loop.epoch_loop.run"``.
            wrapper: Is given the method.
        """
        *_, method = steps = name.split(".")
        function: Any = owner
        for step in steps:
            owner, function = function, getattr(function, step, None)
            if function is None:
                self.miss(f"{type(owner).__name__}.{step}")
                return
        # Where the same instance was wrapped before, that wrapper is put back, not lost.
        if method in vars(owner):
            self._undo.append(functools.partial(setattr, owner, method, vars(owner)[method]))
        else:
            # Whoever has wrapped it since may have taken it off altogether.
            self._undo.append(functools.partial(vars(owner).pop, method, None))
        wrapped = wrapper(function)
        if not isinstance(owner, type):  # a class binds functions alone
            wrapped = _StandIn(wrapped)
            wrapped.owner, wrapped.name = owner, method
        setattr(owner, method, wrapped)

    def miss(self, name: str) -> None:
        """Note that something is not there."""
        if name not in self.missing:
            self.missing.append(name)

    def undo(self) -> None:
        """Take all of them off, the last one first; nothing happens the second time."""
        while self._undo:
            self._undo.pop()()


def before(action: Callable[[], None]) -> Callable[[_Function], _Function]:
    """Return a wrapper that does something before the method."""

    def wrapper(function: _Function) -> _Function:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            action()
            return function(*args, **kwargs)

        return wrapped

    return wrapper


def after(action: Callable[[], None]) -> Callable[[_Function], _Function]:
    """Return a wrapper that does something after the method, if that did not raise."""

    def wrapper(function: _Function) -> _Function:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            action()
            return result

        return wrapped

    return wrapper
