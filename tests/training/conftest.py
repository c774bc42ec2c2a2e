"""Fixtures for the tests of what is measured without Lightning."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _clocks_end() -> Iterator[None]:
    """Remove the callbacks of clocks that a test has not stopped, which would run in later tests."""
    before = list(gc.callbacks)
    yield
    gc.callbacks[:] = before
