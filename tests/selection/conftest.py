"""Fixtures for tests of claims."""

from pathlib import Path

import pytest

from lightning_gpu_tools.selection.claims import warn_once


@pytest.fixture
def path(claims_dir: Path) -> Path:
    """Return the path of the claims folder, which does not exist yet. No warning was given before."""
    warn_once.cache_clear()
    return claims_dir
