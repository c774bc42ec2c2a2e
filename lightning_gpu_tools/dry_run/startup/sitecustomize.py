"""The entry of a dry run into each Python process of its command: this folder is the first of ``PYTHONPATH``.

Python imports this module at its start. It waits for torch, and runs the user's own module of this name, if any.
"""

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType

VARIABLE = "LIGHTNING_GPU_TOOLS_DRY_RUN"  # the folder of the dry run


def _run_the_users_own() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _wait_for_torch() -> None:
    if importlib.util.find_spec("lightning_gpu_tools") is None:  # the command has another Python environment
        sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)))
    from lightning_gpu_tools.trainer.import_hooks import when_imported

    when_imported("", _record, ("torch",))


def _record(torch: ModuleType) -> None:
    from lightning_gpu_tools.dry_run.recorder import Recorder

    Recorder(os.environ[VARIABLE]).start()


if os.environ.get(VARIABLE):
    _wait_for_torch()
    _run_the_users_own()
