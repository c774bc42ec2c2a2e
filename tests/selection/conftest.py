"""Fixtures for tests of claims."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_gpu_tools.selection.claims import held_claims, warn_once


@pytest.fixture(autouse=True)
def no_claim_is_left() -> Iterator[None]:
    yield
    for claim in held_claims():
        claim.release()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of the claims folder, which does not exist yet. No warning was given before."""
    warn_once.cache_clear()
    return tmp_path / "claims"
