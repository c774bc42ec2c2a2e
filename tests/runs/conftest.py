"""Trainings without the extra ``plot``: drawing a report takes longer than most trainings here."""

import sys

import pytest


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
