"""A fake NVIDIA driver: stands where ``libnvidia-ml.so.1`` stands, below the real ``nvidia-ml-py``.

The state of the driver is a JSON file named by the environment variable ``FAKE_NVIDIA_DRIVER``. It is looked at again
on every call and replaced atomically, so it can be changed while a program runs, and any number of processes share it.

    driver = Driver(tmp_path)
    driver.gpus = [gpu(memory_free="21GiB", utilization=90), gpu(processes=[process(pid=4711, memory="3GiB")])]
    subprocess.run([sys.executable, ...], env={**os.environ, **driver.variables()})
    driver.gpus[0].lost = True
"""

from fake_driver.library import VARIABLE, install, uninstall
from fake_driver.state import GIB, Driver, gpu, mig, process

__all__ = ["GIB", "VARIABLE", "Driver", "gpu", "install", "mig", "process", "uninstall"]
