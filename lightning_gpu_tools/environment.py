"""The package's version, and the environment variable that disables it."""

import os

# Defined here, not read from the installation, so that a clone on PYTHONPATH has a version, too.
VERSION = "0.1.0"


def is_disabled() -> bool:
    """Return whether ``LIGHTNING_GPU_TOOLS_DISABLE=1`` disables all callbacks of the package. Read on each call."""
    return os.environ.get("LIGHTNING_GPU_TOOLS_DISABLE", "") not in ("", "0")
