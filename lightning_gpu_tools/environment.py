"""The package's version, and the environment variable that switches it off, read each time it is asked for."""

from __future__ import annotations

import os

# Written here and not asked of the installation, so that a clone on PYTHONPATH knows it, too.
VERSION = "0.1.0"


def is_disabled() -> bool:
    """Return whether ``LIGHTNING_GPU_TOOLS_DISABLE=1`` switches every callback of the package off."""
    return os.environ.get("LIGHTNING_GPU_TOOLS_DISABLE", "") not in ("", "0")
