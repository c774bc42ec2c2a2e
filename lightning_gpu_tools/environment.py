"""The package's version, and the environment variable that disables it."""

import os

# Not read from the installation, so that a clone on PYTHONPATH has a version, too.
VERSION = "0.1.0"


def is_disabled() -> bool:
    """Return whether ``LIGHTNING_GPU_TOOLS_DISABLE=1`` is set, which disables all callbacks of the package."""
    return os.environ.get("LIGHTNING_GPU_TOOLS_DISABLE", "") not in ("", "0")
