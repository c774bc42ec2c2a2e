"""Python runs this at the start of every process that has this folder on PYTHONPATH; it puts the fake driver in place.

Any other ``sitecustomize`` on the path is run as well, as it would have been without this one.
"""

import importlib.machinery
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _run_the_next_sitecustomize() -> None:
    path = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _install_the_fake_driver() -> None:
    # Only this one package, by its path: the folder of the tests does not come onto sys.path.
    path = os.path.join(os.path.dirname(_FOLDER), "library", "__init__.py")
    spec = importlib.util.spec_from_file_location("fake_driver_library", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.install()


if "FAKE_NVIDIA_DRIVER" in os.environ:
    _install_the_fake_driver()
_run_the_next_sitecustomize()
