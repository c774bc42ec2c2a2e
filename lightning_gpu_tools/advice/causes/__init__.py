"""What slows training down: one file a cause, which holds all that the package knows of it. The folder is the registry.

A new cause is a new file with a ``CAUSE``: the report, the table of docs/low_gpu_utilization.md and the tests take it
from there.
"""

from __future__ import annotations

from graphlib import TopologicalSorter
from importlib import import_module
from pkgutil import iter_modules

from lightning_gpu_tools.advice.cause import Cause

_FILES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
_NAMED: dict[str, Cause] = {file.CAUSE.name: file.CAUSE for file in _FILES}
# By name, each behind those after which it is judged.
CAUSES = {name: _NAMED[name] for name in TopologicalSorter({c.name: c.after for c in _NAMED.values()}).static_order()}
