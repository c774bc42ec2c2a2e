"""Trainings without the extra ``plot``, but where the picture is asked for."""

import sys

import pytest


@pytest.fixture
def pictures() -> None:
    """Have reports drawn, which takes longer than most trainings here."""


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pictures" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
