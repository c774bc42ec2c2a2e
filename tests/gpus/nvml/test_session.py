"""The driver, opened and closed, in threads and forked children, and why it cannot be."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from fake_driver import gpu

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import nvml


def unavailable(driver, **state) -> str:
    with driver.change():
        vars(driver).update(state)
    with pytest.raises(NvmlUnavailableError) as caught, nvml.session():
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"library_missing": True}, ["libnvidia-ml.so.1", "nvidia-smi", "--gpus all", "utility"]),
        ({"init_error": "DRIVER_NOT_LOADED"}, ["not loaded", "modprobe"]),
        ({"init_error": "LIB_RM_VERSION_MISMATCH"}, ["updated", "Reboot"]),
        ({"init_error": "NO_PERMISSION"}, ["/dev/nvidiactl"]),
        ({"init_error": "UNKNOWN"}, ["Unknown Error", "nvidia-smi"]),
        ({"missing_functions": ["nvmlInitWithFlags"]}, ["too old"]),
    ],
    ids=lambda value: None if isinstance(value, list) else next(iter(value.values())),
)
def test_without_a_driver_the_message_names_the_remedy(driver, state, says):
    message = unavailable(driver, **state)
    assert all(part in message for part in says), message


def test_a_driver_that_fails_later_is_unavailable_too(driver):
    driver.errors = {"nvmlDeviceGetCount_v2": "DRIVER_NOT_LOADED"}
    with pytest.raises(NvmlUnavailableError, match="not loaded"):
        nvml.read_gpus()


def wheel_of_nvidia_ml_py(folder: Path) -> None:
    """Make a wheel of the installed nvidia-ml-py, so that pip needs no network."""
    found = metadata.distribution("nvidia-ml-py")
    with zipfile.ZipFile(folder / f"nvidia_ml_py-{found.version}-py3-none-any.whl", "w") as wheel:
        for file in found.files or ():
            if file.suffix != ".pyc" and file.name not in ("INSTALLER", "REQUESTED", "direct_url.json"):
                wheel.write(file.locate(), file.as_posix())


@pytest.mark.follows("Run `pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py`")
def test_the_advised_pip_commands_give_what_is_needed(driver, tmp_path, claims_dir):
    driver.gpus = [gpu()]
    python = tmp_path / "venv" / "bin" / "python"
    venv.create(tmp_path / "venv")
    python.with_name("pip").write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {python} "$@"\n')
    python.with_name("pip").chmod(0o755)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    wheel_of_nvidia_ml_py(tmp_path)
    paths = {"PATH": f"{python.parent}:{os.environ['PATH']}", **driver.variables()}
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def sh(command):
        options = {"env": {**os.environ, **paths, **offline}, "capture_output": True, "text": True, "input": "y\n"}
        return subprocess.run(["sh", "-c", command], check=False, **options)

    (site / "pynvml").mkdir()  # a folder, which Python prefers to the file of nvidia-ml-py
    (site / "pynvml" / "__init__.py").write_text("class NVMLError(Exception): pass\n")
    described = site / "pynvml-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: pynvml\nVersion: 1.0\n")
    (described / "INSTALLER").write_text("pip\n")
    (described / "RECORD").write_text("pynvml/__init__.py,,\npynvml-1.0.dist-info/METADATA,,\n")
    pick = "python -m lightning_gpu_tools pick"
    done = sh(re.search("Run `(.*)`", sh(pick).stderr)[1])
    assert done.returncode == 0, done.stderr
    assert sh(pick).stdout == f"{driver.gpus[0].uuid}\n"
