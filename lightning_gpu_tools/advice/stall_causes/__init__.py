"""Causes of stalls: one file a cause, which holds all that the package knows of it.

The folder is the registry. A new cause is a new file with a ``CAUSE``: the report, the table of
docs/hanging_training.md and the tests take it from there.
"""

from __future__ import annotations

from graphlib import TopologicalSorter
from importlib import import_module
from pkgutil import iter_modules

from lightning_gpu_tools.advice.stall_cause import StallCause

_FILES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
_NAMED: dict[str, StallCause] = {file.CAUSE.name: file.CAUSE for file in _FILES}
_ORDER = TopologicalSorter({cause.name: cause.after for cause in _NAMED.values()}).static_order()
# By name, each behind those after which it is judged.
STALL_CAUSES = {name: _NAMED[name] for name in _ORDER}
