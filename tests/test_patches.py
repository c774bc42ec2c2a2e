"""Wrappers around methods of other objects come off in any order, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, call

import pytest

from lightning_gpu_tools.patches import Patches


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
