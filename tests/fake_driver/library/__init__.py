"""The object that stands in for the ``CDLL`` of ``libnvidia-ml.so.1``: C functions as Python callables.

They fill the caller's ctypes structures by field name and return NVML return codes, as nvml.h documents them, so
``pynvml`` (or any other ctypes user) runs on top unchanged. A function that the object does not have raises
``AttributeError``, which ``pynvml`` turns into ``NVMLError_FunctionNotFound``: so an old driver is data, too. Only
torch finds no driver: a build for CUDA would take its GPUs for CUDA's, and none stands behind it.

Standard library only, and cheap to import: it is loaded at the start of every child process of a test.
"""

import ctypes
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from .functions import FUNCTIONS, OF_CLOSED, ON_DEVICE, ON_MIG, instances
from .values import NvmlFailure, address_of

VARIABLE = "FAKE_NVIDIA_DRIVER"
CALLS_VARIABLE = "FAKE_NVIDIA_DRIVER_CALLS"


class Library:
    """The driver library of one process, and what that process did with it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._init_count = 0
        self._stamp: tuple[int, int] | None = None
        self._state: Any = None
        self._uuids: dict[int, str] = {}  # device handle -> uuid
        self._samples: dict[int, Any] = {}  # GPM sample handle -> what was taken
        self._event_sets: dict[int, Any] = {}
        self._next_address = 0x7F5A00000000
        self._lock = threading.RLock()  # the driver is called in several threads at once

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in FUNCTIONS or name in self.state.missing_functions:
            raise AttributeError(f"libnvidia-ml.so.1: undefined symbol: {name}")

        def function(*arguments: Any) -> int:
            return self._call(name, arguments)

        function.__name__ = name
        setattr(self, name, function)
        return function

    @property
    def state(self) -> Any:
        path = os.environ[VARIABLE]
        status = os.stat(path)
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp != self._stamp:
            with open(path) as file:
                self._state = json.load(file, object_hook=_namespace)
            self._stamp = stamp
        return self._state

    @property
    def now_s(self) -> float:
        return time.time() if self.state.now_s is None else self.state.now_s

    @property
    def elapsed_s(self) -> float:
        return self.now_s - self.state.start_s

    def new_address(self) -> int:
        with self._lock:
            self._next_address += 0x1000
            return self._next_address

    def handle_of(self, uuid: str) -> int:
        """The address that stands for a GPU or MIG instance in this process."""
        with self._lock:
            for address, known in self._uuids.items():
                if known == uuid:
                    return address
            address = self.new_address()
            self._uuids[address] = uuid
            return address

    def find(self, uuid: str) -> SimpleNamespace:
        """The GPU or MIG instance; an instance has its GPU as ``parent``."""
        for card in self.state.gpus:
            if card.uuid == uuid:
                return card
            for instance in instances(card):
                if instance.uuid == uuid:
                    instance.parent = card
                    return instance
        raise NvmlFailure("GPU_IS_LOST" if uuid in [*self._uuids.values()] else "NOT_FOUND")

    def check(self, device: Any, function: str) -> None:
        """Raise what this device is told to fail with."""
        parent = getattr(device, "parent", None)
        if getattr(device, "lost", False) or getattr(parent, "lost", False):
            raise NvmlFailure("GPU_IS_LOST")
        if getattr(device, "closed", False) and function not in OF_CLOSED:
            raise NvmlFailure("NO_PERMISSION")
        for errors in filter(None, (device.errors, parent and parent.errors)):
            _fail_if_told(errors, function, "*")

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int:
        if os.getpid() != self._pid:  # a forked child: what the parent opened is not open here
            self._pid, self._init_count = os.getpid(), 0
            self._uuids.clear()
        uuid = self._uuids.get(address_of(arguments[0])) if name in ON_DEVICE else None
        log = os.environ.get(CALLS_VARIABLE)
        if log:
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
            line = f"{self._pid} {name} {uuid or ''} {threading.current_thread().name}\n"
            os.write(descriptor, line.encode(errors="surrogateescape"))
            os.close(descriptor)
        try:
            if not self._init_count and not name.startswith(("nvmlInit", "nvmlErrorString")):
                raise NvmlFailure("UNINITIALIZED")
            while name == self.state.hangs or any(name == card.hangs and card.uuid == uuid for card in self.state.gpus):
                time.sleep(0.01)  # as in an ioctl() that does not return
            _fail_if_told(self.state.errors, name)
            if name in ON_DEVICE:
                if uuid is None:
                    raise NvmlFailure("INVALID_ARGUMENT")
                device = self.find(uuid)
                self.check(device, name)
                if hasattr(device, "parent") and name not in ON_MIG:
                    raise NvmlFailure("NOT_SUPPORTED")
                arguments = (device, *arguments[1:])
            result = FUNCTIONS[name](self, *arguments)
        except NvmlFailure as failure:
            return failure.code
        return 0 if result is None else result


def _namespace(fields: dict[str, Any]) -> Any:
    # Dictionaries with free keys stay dictionaries: errors, gpm, answers, field_values.
    return SimpleNamespace(**fields) if fields.keys() & {"gpus", "uuid", "pid"} else fields


def _fail_if_told(errors: dict[str, str], function: str, *others: str) -> None:
    for name in (function, re.sub(r"_v\d$", "", function), *others):
        if name in errors:
            raise NvmlFailure(errors[name])


_real_cdll: Any = None


def install() -> None:
    """Let ``CDLL("libnvidia-ml.so.1")`` give the fake wherever ``FAKE_NVIDIA_DRIVER`` is set; idempotent."""
    global _real_cdll
    if _real_cdll is not None:
        return
    _real_cdll = real = ctypes.CDLL
    library = Library()

    class CDLL(real):  # type: ignore[misc, valid-type]
        def __new__(cls, name: Any = None, *arguments: Any, **options: Any) -> Any:
            if name != "libnvidia-ml.so.1" or VARIABLE not in os.environ:
                return super().__new__(cls)
            is_torch = str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")
            if library.state.library_missing or is_torch:
                raise OSError("libnvidia-ml.so.1: cannot open shared object file: No such file or directory")
            return library

    ctypes.CDLL = CDLL
    if "pynvml" in sys.modules:  # it did `from ctypes import *`
        sys.modules["pynvml"].CDLL = CDLL


def uninstall() -> None:
    """Put the real ``CDLL`` back."""
    global _real_cdll
    if _real_cdll is not None:
        ctypes.CDLL = _real_cdll
        if "pynvml" in sys.modules:
            sys.modules["pynvml"].CDLL = _real_cdll
        _real_cdll = None
