"""The object that stands in for the ``CDLL`` of ``libnvidia-ml.so.1``: C functions as Python callables.

They fill the caller's ctypes structures by field name and return NVML return codes, as nvml.h documents them, so
``pynvml`` (or any other ctypes user, for example torch) runs on top unchanged. A function that the object does not have
raises ``AttributeError``, which ``pynvml`` turns into ``NVMLError_FunctionNotFound``: so an old driver is data, too.

Standard library only, and cheap to import: it is loaded at the start of every child process of a test.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

VARIABLE = "FAKE_NVIDIA_DRIVER"
CALLS_VARIABLE = "FAKE_NVIDIA_DRIVER_CALLS"

# nvml.h, nvmlReturn_t
CODES = {
    "SUCCESS": 0,
    "UNINITIALIZED": 1,
    "INVALID_ARGUMENT": 2,
    "NOT_SUPPORTED": 3,
    "NO_PERMISSION": 4,
    "NOT_FOUND": 6,
    "INSUFFICIENT_SIZE": 7,
    "INSUFFICIENT_POWER": 8,
    "DRIVER_NOT_LOADED": 9,
    "TIMEOUT": 10,
    "IRQ_ISSUE": 11,
    "CORRUPTED_INFOROM": 14,
    "GPU_IS_LOST": 15,
    "RESET_REQUIRED": 16,
    "OPERATING_SYSTEM": 17,
    "LIB_RM_VERSION_MISMATCH": 18,
    "IN_USE": 19,
    "MEMORY": 20,
    "NO_DATA": 21,
    "ARGUMENT_VERSION_MISMATCH": 25,
    "NOT_READY": 27,
    "UNKNOWN": 999,
}
_VALUE_NOT_AVAILABLE = 2**64 - 1
_NO_INSTANCE = 2**32 - 1
_UNSIGNED_INT, _UNSIGNED_LONG_LONG = 1, 3  # nvmlValueType_t


class NvmlFailure(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.code = CODES[name]


# -- quantities over time ------------------------------------------------------------------------------------------


def value_at(series: Any, elapsed_s: float) -> float:
    """The value of a `state.Series` this long after the driver's start."""
    if isinstance(series, (int, float)):
        return series
    return next((value for start, value in reversed(series) if start <= elapsed_s), 0.0)


def integral(series: Any, elapsed_s: float) -> float:
    """The integral from the driver's start; a constant has always been there, also before the start."""
    if isinstance(series, (int, float)):
        return series * elapsed_s
    ends = [start for start, _ in series[1:]] + [math.inf]
    return sum(value * max(0.0, min(elapsed_s, end) - start) for (start, value), end in zip(series, ends, strict=True))


def mean(series: Any, begin_s: float, end_s: float) -> float:
    if isinstance(series, (int, float)):
        return series
    return (integral(series, end_s) - integral(series, begin_s)) / (end_s - begin_s)


# -- ctypes --------------------------------------------------------------------------------------------------------


def _in(argument: Any) -> Any:
    """The Python value of an argument passed by value: c_uint(3), 3, c_char_p(b'x')."""
    return getattr(argument, "value", argument)


def _out(argument: Any) -> Any:
    """What byref(x) points to; arrays are passed as they are."""
    return getattr(argument, "_obj", argument)


def _address(handle: Any) -> int:
    return ctypes.cast(_out(handle), ctypes.c_void_p).value or 0


def _point(pointer: Any, address: int) -> None:
    ctypes.c_void_p.from_buffer(_out(pointer)).value = address


def _text(buffer: Any, size: Any, text: str) -> None:
    if len(text) + 1 > _in(size):
        raise NvmlFailure("INSUFFICIENT_SIZE")
    _out(buffer).value = text.encode()


def _required(value: Any) -> Any:
    if value is None:
        raise NvmlFailure("NOT_SUPPORTED")
    return value


# -- the library ---------------------------------------------------------------------------------------------------

_FUNCTIONS: dict[str, Callable[..., None]] = {}
_ON_DEVICE: set[str] = set()
_ON_MIG: set[str] = set()


def _function(*names: str) -> Callable[..., Any]:
    """A C function without a device."""

    def register(implementation: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            _FUNCTIONS[name] = implementation
        return implementation

    return register


def _device_function(*names: str, mig: bool = False) -> Callable[..., Any]:
    """A C function whose first argument is a device handle; ``mig``: also that of a MIG instance."""
    _ON_DEVICE.update(names)
    if mig:
        _ON_MIG.update(names)
    return _function(*names)


def instances(card: Any) -> list[Any]:
    """The MIG instances of a GPU."""
    return [instance for instance in card.mig or [] if instance is not None]


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

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in _FUNCTIONS or name in self.state.missing_functions:
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
        self._next_address += 0x1000
        return self._next_address

    def handle_of(self, uuid: str) -> int:
        """The address that stands for a GPU or MIG instance in this process."""
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
        raise NvmlFailure("GPU_IS_LOST" if uuid in self._uuids.values() else "NOT_FOUND")

    def check(self, device: Any, function: str) -> None:
        """Raise what this device is told to fail with."""
        parent = getattr(device, "parent", None)
        if getattr(device, "lost", False) or getattr(parent, "lost", False):
            raise NvmlFailure("GPU_IS_LOST")
        for errors in filter(None, (device.errors, parent and parent.errors)):
            for name in (function, re.sub(r"_v\d$", "", function), "*"):
                if name in errors:
                    raise NvmlFailure(errors[name])

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int:
        if os.getpid() != self._pid:  # a forked child: what the parent opened is not open here
            self._pid, self._init_count = os.getpid(), 0
            self._uuids.clear()
        uuid = self._uuids.get(_address(arguments[0])) if name in _ON_DEVICE else None
        log = os.environ.get(CALLS_VARIABLE)
        if log:
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
            os.write(descriptor, f"{self._pid} {name} {uuid or ''} {threading.current_thread().name}\n".encode())
            os.close(descriptor)
        state = self.state
        if name in state.latency_s:
            time.sleep(state.latency_s[name])
        try:
            if not self._init_count and not name.startswith(("nvmlInit", "nvmlErrorString")):
                raise NvmlFailure("UNINITIALIZED")
            for key in (name, re.sub(r"_v\d$", "", name)):
                if key in state.errors:
                    raise NvmlFailure(state.errors[key])
            if name in _ON_DEVICE:
                if uuid is None:
                    raise NvmlFailure("INVALID_ARGUMENT")
                device = self.find(uuid)
                self.check(device, name)
                if hasattr(device, "parent") and name not in _ON_MIG:
                    raise NvmlFailure("NOT_SUPPORTED")
                arguments = (device, *arguments[1:])
            result = _FUNCTIONS[name](self, *arguments)
        except NvmlFailure as failure:
            return failure.code
        return 0 if result is None else result


def _namespace(fields: dict[str, Any]) -> Any:
    # Dictionaries with free keys stay dictionaries: errors, gpm, field_values, latency_s.
    return SimpleNamespace(**fields) if fields.keys() & {"gpus", "uuid", "pid"} else fields


# Starting and stopping


@_function("nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags")
def _init(library: Library, _flags: Any = 0) -> None:
    if library.state.init_error:
        raise NvmlFailure(library.state.init_error)
    library._init_count += 1


@_function("nvmlShutdown")
def _shutdown(library: Library) -> None:
    library._init_count -= 1


_MESSAGES = {code: name.replace("_", " ").capitalize().encode() for name, code in CODES.items()}


@_function("nvmlErrorString")
def _error_string(_library: Library, code: Any) -> bytes:
    return _MESSAGES.get(_in(code), b"Unknown Error")


@_function("nvmlSystemGetDriverVersion")
def _driver_version(library: Library, buffer: Any, size: Any) -> None:
    _text(buffer, size, library.state.driver_version)


@_function("nvmlSystemGetNVMLVersion")
def _nvml_version(library: Library, buffer: Any, size: Any) -> None:
    _text(buffer, size, "13." + library.state.driver_version)


@_function("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2")
def _cuda_version(library: Library, version: Any) -> None:
    _out(version).value = library.state.cuda_version


# Finding devices


@_function("nvmlDeviceGetCount", "nvmlDeviceGetCount_v2")
def _count(library: Library, count: Any) -> None:
    _out(count).value = len(library.state.gpus)


@_function("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByIndex_v2")
def _by_index(library: Library, index: Any, handle: Any) -> None:
    if not 0 <= _in(index) < len(library.state.gpus):
        raise NvmlFailure("INVALID_ARGUMENT")
    device = library.state.gpus[_in(index)]
    library.check(device, "nvmlDeviceGetHandleByIndex")
    _point(handle, library.handle_of(device.uuid))


@_function("nvmlDeviceGetHandleByUUID")
def _by_uuid(library: Library, uuid: Any, handle: Any) -> None:
    wanted = _in(uuid).decode()
    known = [card.uuid for card in library.state.gpus]
    known += [instance.uuid for card in library.state.gpus for instance in instances(card)]
    if wanted not in known:
        raise NvmlFailure("NOT_FOUND")
    library.check(library.find(wanted), "nvmlDeviceGetHandleByUUID")
    _point(handle, library.handle_of(wanted))


@_function("nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetHandleByPciBusId_v2")
def _by_pci(library: Library, bus_id: Any, handle: Any) -> None:
    wanted = [int(part, 16) for part in re.split("[:.]", _in(bus_id).decode())][:3]
    for card in library.state.gpus:
        if list(card.pci) == wanted:
            library.check(card, "nvmlDeviceGetHandleByPciBusId")
            _point(handle, library.handle_of(card.uuid))
            return
    raise NvmlFailure("NOT_FOUND")


@_device_function("nvmlDeviceGetIndex")
def _index(library: Library, device: Any, index: Any) -> None:
    _out(index).value = library.state.gpus.index(device)


@_device_function("nvmlDeviceGetUUID", mig=True)
def _uuid(_library: Library, device: Any, buffer: Any, size: Any) -> None:
    _text(buffer, size, device.uuid)


@_device_function("nvmlDeviceGetName", mig=True)
def _name(_library: Library, device: Any, buffer: Any, size: Any) -> None:
    parent = getattr(device, "parent", None)
    _text(buffer, size, f"{parent.name} MIG {device.profile}" if parent else device.name)


@_device_function("nvmlDeviceGetPciInfo_v3")
def _pci_info(_library: Library, device: Any, info: Any) -> None:
    info = _out(info)
    info.domain, info.bus, info.device = device.pci
    info.busId = "{:08X}:{:02X}:{:02X}.0".format(*device.pci).encode()
    info.busIdLegacy = "{:04X}:{:02X}:{:02X}.0".format(*device.pci).encode()
    info.pciDeviceId = 0x233510DE


# Memory, processes, modes


@_device_function("nvmlDeviceGetMemoryInfo", mig=True)
def _memory(_library: Library, device: Any, info: Any) -> None:
    info = _out(info)
    info.total, info.free = _required(device.memory_total), _required(device.memory_free)
    info.used = info.total - info.free


@_device_function("nvmlDeviceGetMemoryInfo_v2", mig=True)
def _memory_v2(_library: Library, device: Any, info: Any) -> None:
    info = _out(info)
    if info.version != (2 << 24 | ctypes.sizeof(info)):
        raise NvmlFailure("ARGUMENT_VERSION_MISMATCH")
    info.total, info.free = _required(device.memory_total), _required(device.memory_free)
    info.reserved = getattr(device, "memory_reserved", 0)
    info.used = info.total - info.free - info.reserved


def _processes(device: Any, count: Any, infos: Any, *, graphics: bool) -> None:
    parent = getattr(device, "parent", None)
    found = [process for process in _required((parent or device).processes) if process.graphics is graphics]
    if parent:
        found = [process for process in found if process.gpu_instance == device.gpu_instance]
    space, _out(count).value = _out(count).value, len(found)
    if len(found) > space:
        raise NvmlFailure("INSUFFICIENT_SIZE")
    for info, process in zip(_out(infos) or (), found, strict=False):
        info.pid = process.pid
        info.usedGpuMemory = _VALUE_NOT_AVAILABLE if process.memory is None else process.memory
        info.gpuInstanceId = _NO_INSTANCE if process.gpu_instance is None else process.gpu_instance
        info.computeInstanceId = _NO_INSTANCE if process.gpu_instance is None else 0


@_device_function("nvmlDeviceGetComputeRunningProcesses_v3", mig=True)
def _compute_processes(_library: Library, device: Any, count: Any, infos: Any) -> None:
    _processes(device, count, infos, graphics=False)


@_device_function("nvmlDeviceGetGraphicsRunningProcesses_v3", mig=True)
def _graphics_processes(_library: Library, device: Any, count: Any, infos: Any) -> None:
    _processes(device, count, infos, graphics=True)


@_device_function("nvmlDeviceGetProcessUtilization")
def _process_utilization(library: Library, device: Any, infos: Any, count: Any, last_us: Any) -> None:
    now_us = int(library.now_s * 1e6)
    found = [process for process in _required(device.processes) if process.sm is not None and now_us > _in(last_us)]
    if not found:
        raise NvmlFailure("NOT_FOUND")
    space, _out(count).value = _out(count).value, len(found)
    if len(found) > space:
        raise NvmlFailure("INSUFFICIENT_SIZE")
    for info, process in zip(_out(infos), found, strict=False):
        info.pid, info.timeStamp, info.smUtil = process.pid, now_us, process.sm


@_device_function("nvmlDeviceGetComputeMode")
def _compute_mode(_library: Library, device: Any, mode: Any) -> None:
    modes = ["default", "exclusive_thread", "prohibited", "exclusive_process"]
    _out(mode).value = modes.index(_required(device.compute_mode))


@_device_function("nvmlDeviceGetPersistenceMode")
def _persistence_mode(_library: Library, _device: Any, mode: Any) -> None:
    _out(mode).value = 1


@_device_function("nvmlDeviceGetAddressingMode")
def _addressing_mode(_library: Library, device: Any, mode: Any) -> None:
    _out(mode).value = ["none", "hmm", "ats"].index(_required(device.addressing_mode))


# MIG


@_device_function("nvmlDeviceGetMigMode")
def _mig_mode(_library: Library, device: Any, current: Any, pending: Any) -> None:
    if not device.mig_capable:
        raise NvmlFailure("NOT_SUPPORTED")
    _out(current).value = _out(pending).value = int(device.mig is not None)


@_device_function("nvmlDeviceGetMaxMigDeviceCount")
def _max_mig_count(_library: Library, device: Any, count: Any) -> None:
    _out(count).value = 7 if device.mig_capable else 0


@_device_function("nvmlDeviceGetMigDeviceHandleByIndex")
def _mig_by_index(library: Library, device: Any, index: Any, handle: Any) -> None:
    if device.mig is None or _in(index) >= 7:
        raise NvmlFailure("INVALID_ARGUMENT")
    if _in(index) >= len(device.mig) or device.mig[_in(index)] is None:
        raise NvmlFailure("NOT_FOUND")
    _point(handle, library.handle_of(device.mig[_in(index)].uuid))


@_device_function("nvmlDeviceIsMigDeviceHandle", mig=True)
def _is_mig(_library: Library, device: Any, answer: Any) -> None:
    _out(answer).value = int(hasattr(device, "parent"))


@_device_function("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", mig=True)
def _mig_parent(library: Library, device: Any, handle: Any) -> None:
    if not hasattr(device, "parent"):
        raise NvmlFailure("INVALID_ARGUMENT")
    _point(handle, library.handle_of(device.parent.uuid))


@_device_function("nvmlDeviceGetGpuInstanceId", mig=True)
def _gpu_instance(_library: Library, device: Any, identifier: Any) -> None:
    _out(identifier).value = _required(getattr(device, "gpu_instance", None))


@_device_function("nvmlDeviceGetComputeInstanceId", mig=True)
def _compute_instance(_library: Library, device: Any, identifier: Any) -> None:
    _out(identifier).value = _required(getattr(device, "compute_instance", None))


# Utilization


def _utilization_samples(library: Library, device: Any) -> list[tuple[int, int]]:
    """What the driver's buffer holds now: (microseconds since the epoch, percent)."""
    if device.mig is not None:
        raise NvmlFailure("NOT_SUPPORTED")
    if device.samples is not None:
        return [(round(seconds * 1e6), int(value)) for seconds, value in device.samples]
    series, period = _required(device.utilization), device.sample_period_s
    newest = math.floor(library.now_s / period)
    ends = [number * period for number in range(newest - device.sample_depth + 1, newest + 1)]
    start = library.state.start_s
    return [(round(end * 1e6), round(mean(series, end - period - start, end - start))) for end in ends]


@_device_function("nvmlDeviceGetSamples")
def _samples(library: Library, device: Any, kind: Any, last_us: Any, value_type: Any, count: Any, samples: Any) -> None:
    if _in(kind) != 1:  # NVML_GPU_UTILIZATION_SAMPLES
        raise NvmlFailure("NOT_SUPPORTED")
    found = [sample for sample in _utilization_samples(library, device) if sample[0] > _in(last_us)]
    _out(value_type).value = _UNSIGNED_INT
    if samples is None:  # asked for the size: that of the buffer, however much of it is new
        _out(count).value = max(device.sample_depth, len(found))
        return
    if not found:
        raise NvmlFailure("NOT_FOUND")
    found = found[-_out(count).value :]
    _out(count).value = len(found)
    for sample, (stamp_us, value) in zip(_out(samples), found, strict=False):
        sample.timeStamp = stamp_us
        sample.sampleValue.uiVal = value


@_device_function("nvmlDeviceGetUtilizationRates")
def _utilization_rates(library: Library, device: Any, rates: Any) -> None:
    rates = _out(rates)
    if device.mig is not None:
        raise NvmlFailure("NOT_SUPPORTED")
    if device.utilization_rate is None:
        rates.gpu = round(value_at(_required(device.utilization), library.elapsed_s))
    else:
        rates.gpu = device.utilization_rate
    rates.memory = device.memory_utilization


# Power, heat, counters


@_device_function("nvmlDeviceGetPowerUsage")
def _power(library: Library, device: Any, milliwatts: Any) -> None:
    _out(milliwatts).value = round(1000 * value_at(_required(device.power_watts), library.elapsed_s))


@_device_function("nvmlDeviceGetTotalEnergyConsumption")
def _energy(library: Library, device: Any, millijoules: Any) -> None:
    start = _required(device.energy_joules_at_start)
    _out(millijoules).value = round(1000 * (start + integral(_required(device.power_watts), library.elapsed_s)))


@_device_function("nvmlDeviceGetTemperature")
def _temperature(_library: Library, device: Any, _sensor: Any, celsius: Any) -> None:
    _out(celsius).value = int(_required(device.temperature_celsius))


@_device_function("nvmlDeviceGetTemperatureV")
def _temperature_v(_library: Library, device: Any, temperature: Any) -> None:
    _out(temperature).temperature = int(_required(device.temperature_celsius))


@_device_function("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
def _clocks_event_reasons(_library: Library, device: Any, reasons: Any) -> None:
    _out(reasons).value = _required(device.clocks_event_reasons)


@_device_function("nvmlDeviceGetClockInfo")
def _clock(_library: Library, device: Any, _kind: Any, mhz: Any) -> None:
    _out(mhz).value = _required(device.sm_clock_mhz)


@_device_function("nvmlDeviceGetMaxClockInfo")
def _highest_clock(_library: Library, device: Any, _kind: Any, mhz: Any) -> None:
    _out(mhz).value = _required(device.sm_clock_max_mhz)


@_device_function("nvmlDeviceGetTotalEccErrors")
def _ecc_errors(_library: Library, device: Any, _kind: Any, _counter: Any, count: Any) -> None:
    _out(count).value = _required(device.ecc_errors)


def _field_value(library: Library, device: Any, field_id: int) -> int:
    if str(field_id) in device.field_values:
        value = device.field_values[str(field_id)]
        if isinstance(value, str):
            raise NvmlFailure(value)
        return value
    if field_id == 4:  # NVML_FI_DEV_ECC_DBE_VOL_TOTAL
        return _required(device.ecc_errors)
    counters = {
        74: (device.throttled_power, 1e9),
        75: (device.throttled_thermal, 1e9),
        83: (device.power_watts, 1e3),
        197: (device.pcie_tx_bytes_per_second, 1),
        198: (device.pcie_rx_bytes_per_second, 1),
    }
    if field_id not in counters:
        raise NvmlFailure("NOT_SUPPORTED")
    series, factor = counters[field_id]
    return round(factor * integral(_required(series), library.elapsed_s))


@_device_function("nvmlDeviceGetFieldValues")
def _field_values(library: Library, device: Any, count: Any, values: Any) -> None:
    for value in list(_out(values))[: _in(count)]:
        value.timestamp = round(library.now_s * 1e6)
        value.valueType = _UNSIGNED_LONG_LONG
        try:
            value.value.ullVal = _field_value(library, device, value.fieldId)
            value.nvmlReturn = 0
        except NvmlFailure as failure:
            value.nvmlReturn = failure.code


# GPM: every metric is the mean between two samples


@_device_function("nvmlGpmQueryDeviceSupport")
def _gpm_support(_library: Library, device: Any, support: Any) -> None:
    _out(support).isSupportedDevice = int(device.gpm is not None)


@_function("nvmlGpmSampleAlloc")
def _gpm_alloc(library: Library, sample: Any) -> None:
    address = library.new_address()
    library._samples[address] = None
    _point(sample, address)


@_function("nvmlGpmSampleFree")
def _gpm_free(library: Library, sample: Any) -> None:
    if _address(sample) not in library._samples:
        raise NvmlFailure("INVALID_ARGUMENT")
    del library._samples[_address(sample)]


def _gpm_take(library: Library, owner: Any, sample: Any) -> None:
    if _address(sample) not in library._samples:
        raise NvmlFailure("INVALID_ARGUMENT")
    library._samples[_address(sample)] = (owner.uuid, library.elapsed_s)


@_device_function("nvmlGpmSampleGet")
def _gpm_sample(library: Library, device: Any, sample: Any) -> None:
    _required(device.gpm)
    _gpm_take(library, device, sample)


@_device_function("nvmlGpmMigSampleGet")
def _gpm_mig_sample(library: Library, device: Any, gpu_instance: Any, sample: Any) -> None:
    _required(device.gpm)
    for instance in instances(device):
        if instance.gpu_instance == _in(gpu_instance):
            _gpm_take(library, instance, sample)
            return
    raise NvmlFailure("NOT_FOUND")


@_function("nvmlGpmMetricsGet")
def _gpm_metrics(library: Library, request: Any) -> None:
    request = _out(request)
    first, second = (library._samples.get(_address(sample)) for sample in (request.sample1, request.sample2))
    if first is None or second is None or first[0] != second[0] or first[1] >= second[1]:
        raise NvmlFailure("INVALID_ARGUMENT")
    owner = library.find(first[0])
    library.check(owner, "nvmlGpmMetricsGet")
    for metric in list(request.metrics)[: request.numMetrics]:
        series = owner.gpm.get(str(metric.metricId))
        metric.nvmlReturn = CODES["NOT_SUPPORTED" if series is None else "SUCCESS"]
        metric.value = 0.0 if series is None else mean(series, first[1], second[1])


# Topology


@_device_function("nvmlDeviceGetTopologyCommonAncestor")
def _common_ancestor(library: Library, device: Any, other: Any, level: Any) -> None:
    _out(level).value = _required(_link(library, device, other).level)


@_device_function("nvmlDeviceGetP2PStatus")
def _p2p_status(library: Library, device: Any, other: Any, capability: Any, status: Any) -> None:
    nvlink = _required(_link(library, device, other).nvlink)
    ok = nvlink if _in(capability) == 2 else True  # NVML_P2P_CAPS_INDEX_NVLINK
    _out(status).value = 0 if ok else 5  # NVML_P2P_STATUS_NOT_SUPPORTED


def _link(library: Library, device: Any, other: Any) -> SimpleNamespace:
    partner = library.find(library._uuids.get(_address(other), ""))
    library.check(partner, "*")
    pair = {library.state.gpus.index(device), library.state.gpus.index(partner)}
    for link in library.state.links:
        if set(link.gpus) == pair:
            return link
    return SimpleNamespace(nvlink=False, level=40 if device.numa_node == partner.numa_node else 50)


def _fill_mask(mask: Any, members: list[int]) -> None:
    words = _out(mask)
    for member in members:
        word, bit = divmod(member, 64)
        if word >= len(words):
            raise NvmlFailure("INSUFFICIENT_SIZE")
        words[word] |= 1 << bit


@_device_function("nvmlDeviceGetMemoryAffinity")
def _memory_affinity(_library: Library, device: Any, _size: Any, mask: Any, _scope: Any) -> None:
    _fill_mask(mask, [_required(device.numa_node)])


@_device_function("nvmlDeviceGetCpuAffinity", "nvmlDeviceGetCpuAffinityWithinScope")
def _cpu_affinity(_library: Library, device: Any, _size: Any, mask: Any, _scope: Any = 0) -> None:
    _fill_mask(mask, _required(device.cpus))


@_device_function("nvmlDeviceGetNumaNodeId")
def _numa_node(_library: Library, device: Any, node: Any) -> None:
    # Only where the memory of the GPU is a NUMA node itself (nvml.h), not the node the GPU hangs on.
    _out(node).value = _required(device.memory_numa_node)


# Events


@_function("nvmlEventSetCreate")
def _event_set_create(library: Library, event_set: Any) -> None:
    address = library.new_address()
    library._event_sets[address] = SimpleNamespace(uuids=set(), seen_s=library.elapsed_s)
    _point(event_set, address)


@_function("nvmlEventSetFree")
def _event_set_free(library: Library, event_set: Any) -> None:
    if library._event_sets.pop(_address(event_set), None) is None:
        raise NvmlFailure("INVALID_ARGUMENT")


@_device_function("nvmlDeviceRegisterEvents")
def _register_events(library: Library, device: Any, _types: Any, event_set: Any) -> None:
    library._event_sets[_address(event_set)].uuids.add(device.uuid)


@_function("nvmlEventSetWait", "nvmlEventSetWait_v2")
def _event_set_wait(library: Library, event_set: Any, data: Any, timeout_ms: Any) -> None:
    events = library._event_sets.get(_address(event_set))
    if events is None:
        raise NvmlFailure("INVALID_ARGUMENT")
    deadline = time.monotonic() + _in(timeout_ms) / 1000
    while True:
        waiting = sorted(
            (at_s, xid, card.uuid)
            for card in library.state.gpus
            if card.uuid in events.uuids
            for at_s, xid in card.xid_events
            if events.seen_s < at_s <= library.elapsed_s
        )
        if waiting:
            events.seen_s, _out(data).eventData, uuid = waiting[0]
            _out(data).eventType = 8  # nvmlEventTypeXidCriticalError
            _point(_out(data).device, library.handle_of(uuid))
            return
        if library.state.now_s is not None or time.monotonic() >= deadline:
            raise NvmlFailure("TIMEOUT")
        time.sleep(0.005)


# -- in place of the real one --------------------------------------------------------------------------------------

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
            if library.state.library_missing:
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
