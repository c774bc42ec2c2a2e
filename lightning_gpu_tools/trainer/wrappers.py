"""Puts wrappers on the methods of single objects, and takes them off again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_Function = Callable[..., Any]


class _StandIn(functools.partial[Any]):
    """Takes the place of a method, but not on copies. A ``partial``, because calling one adds no Python frame."""

    owner: object
    name: str

    def __reduce__(self) -> tuple[_Function, tuple[object, str]]:
        return getattr, (self.owner, self.name)


class Wrappers:
    """The wrappers that were put on."""

    def __init__(self) -> None:
        self.missing: list[str] = []  # Class.method that could not be wrapped
        self._undo: list[Callable[[], object]] = []

    def put(self, owner: object, name: str, wrapper: Callable[[_Function], _Function]) -> None:
        """Replace a method of one object, or of one that attributes lead to: ``"fit_loop.epoch_loop.run"``."""
        *_, method = steps = name.split(".")
        function: Any = owner
        for step in steps:
            owner, function = function, getattr(function, step, None)
            if function is None:
                missing = f"{type(owner).__name__}.{step}"
                if missing not in self.missing:
                    self.missing.append(missing)
                return
        if method in vars(owner):  # a wrapper of somebody else
            self._undo.append(functools.partial(setattr, owner, method, vars(owner)[method]))
        else:  # whoever has wrapped it since may have removed it
            self._undo.append(functools.partial(vars(owner).pop, method, None))
        wrapped = wrapper(function)
        if not isinstance(owner, type):  # a class binds functions alone
            wrapped = _StandIn(wrapped)
            wrapped.owner, wrapped.name = owner, method
        setattr(owner, method, wrapped)

    def undo(self) -> None:
        """Take all of them off; nothing happens the second time."""
        while self._undo:
            self._undo.pop()()


def before(action: Callable[[], None], function: _Function) -> _Function:
    """Return a function that acts before it does what another one does."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        action()
        return function(*args, **kwargs)

    return wrapped


def after(action: Callable[[], None], function: _Function) -> _Function:
    """Return a function that acts after it has done what another one does, if that did not raise."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        action()
        return result

    return wrapped
