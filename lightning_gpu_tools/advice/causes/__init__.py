"""Causes that slow training down. Each has one file with everything about it, and the folder is the registry.

A new cause is a new file with a ``CAUSE``: the report, ``lightning-gpu-tools explain``, the tables of docs/ and the
tests read it from there.
"""

from __future__ import annotations

from lightning_gpu_tools.advice.cause import Cause, in_folder

CAUSES: dict[str, Cause] = in_folder(__name__, __path__)  # by name, in the order in which they are judged
