"""Python runs this at the start of each process with this folder on PYTHONPATH; it puts the fake driver in place."""

import importlib.util
import os
import sys

if "FAKE_NVIDIA_DRIVER" in os.environ:
    # Only this one package, by its path: the folder of the tests does not come onto sys.path.
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "library", "__init__.py")
    spec = importlib.util.spec_from_file_location("fake_driver_library", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.install()
