"""The environment variables that switch this package on and off, each read when it is asked for."""

from __future__ import annotations

import os


def is_disabled() -> bool:
    """Return whether ``LIGHTNING_GPU_TOOLS_DISABLE=1`` switches every callback of the package off."""
    return os.environ.get("LIGHTNING_GPU_TOOLS_DISABLE", "") not in ("", "0")
