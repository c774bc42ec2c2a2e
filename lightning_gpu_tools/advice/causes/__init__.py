"""Causes that slow training down. Each has one file with everything about it, and the folder is the registry.

A new cause is a new file with a ``CAUSE``: the report, the table of docs/low_gpu_utilization.md and the tests take it
from there.
"""

from __future__ import annotations

from lightning_gpu_tools.advice.cause import Cause, in_folder

CAUSES: dict[str, Cause] = in_folder(__name__, __path__)  # by name, in the order in which they are judged
