"""The hook of a dry run in each Python process of its command: this folder is the first entry of ``PYTHONPATH``.

Python imports this module at startup. It starts the recorder once torch is imported, and runs the user's sitecustomize.
"""

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType

VARIABLE = "LIGHTNING_GPU_TOOLS_DRY_RUN"  # the folder of the dry run


def _record(torch: ModuleType) -> None:
    from lightning_gpu_tools.dry_run.recorder import Recorder

    Recorder(os.environ[VARIABLE]).start()


if os.environ.get(VARIABLE):
    if importlib.util.find_spec("lightning_gpu_tools") is None:  # the command has another Python environment
        sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)))
    from lightning_gpu_tools.trainer.import_hooks import when_imported

    when_imported("", _record, ("torch",))
    others = [entry for entry in sys.path if os.path.abspath(entry) != os.path.dirname(os.path.abspath(__file__))]
    users = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if users is not None and users.loader is not None:
        users.loader.exec_module(importlib.util.module_from_spec(users))
