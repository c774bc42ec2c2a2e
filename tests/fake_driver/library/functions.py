"""The C functions of the driver library, which fill the caller's ctypes structures by field name, as nvml.h says.

They have their names in C. A function of a device has it as its second argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .values import CODES, NvmlFailure, address_of, fill, integral, mean, point, pointed, required, value_at, value_of

if TYPE_CHECKING:
    from . import Library

_VALUE_NOT_AVAILABLE = 2**64 - 1
_NO_INSTANCE = 2**32 - 1
_UNSIGNED_INT, _UNSIGNED_LONG_LONG = 1, 3  # nvmlValueType_t
_COMPUTE_MODES = {"default": 0, "prohibited": 2, "exclusive_process": 3}

FUNCTIONS: dict[str, Callable[..., Any]] = {}  # by their names in C
ON_MIG = {
    *("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle"),
    *("nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetMemoryInfo"),
    *("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetName", "nvmlDeviceGetUUID"),
}
# What a container may ask a GPU of which it was given only MIG instances.
OF_CLOSED = {
    *("*", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetUUID", "nvmlDeviceGetName"),
    *("nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"),
}


def instances(card: Any) -> list[Any]:
    """Return the MIG instances of a GPU."""
    return [instance for instance in card.mig or [] if instance is not None]


# Answers that are one number or one text


def _p2p_status(library: Library, device: Any, other: Any, _capability: Any) -> int:
    partner = library.find(library._uuids.get(address_of(other), ""))
    library.check(partner, "*")
    pair = {library.state.gpus.index(device), library.state.gpus.index(partner)}
    return 0 if pair in map(set, library.state.nvlinks) else 5  # NVML_P2P_STATUS_NOT_SUPPORTED


def _milliwatts(library: Library, device: Any) -> float:
    return round(1000 * value_at(required(device.power_watts), library.elapsed_s))


def _number(name: str, answer: Callable[..., int | None]) -> None:
    """Add a function of a device that returns one number by its last argument; ``None``: not supported."""

    def function(library: Library, device: Any, *arguments: Any) -> None:
        pointed(arguments[-1]).value = int(required(answer(library, device, *arguments[:-1])))

    FUNCTIONS[name] = function


_number("nvmlDeviceGetComputeMode", lambda _, device: _COMPUTE_MODES.get(device.compute_mode))
_number("nvmlDeviceGetMaxMigDeviceCount", lambda _, device: 7 if device.mig_capable else 0)
_number("nvmlDeviceGetGpuInstanceId", lambda _, device: getattr(device, "gpu_instance", None))
_number("nvmlDeviceGetPowerUsage", _milliwatts)
_number("nvmlDeviceGetP2PStatus", _p2p_status)

# Functions that return a number by their last argument, and that number, unless `state.Gpu.answers` has another.
NUMBERS = {
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetPowerManagementLimit": 700_000,
    "nvmlDeviceGetPowerManagementLimitConstraints": 700_000,
    "nvmlDeviceGetTemperature": 40,
}
for _name, _default in NUMBERS.items():
    _number(_name, lambda _, device, *__, name=_name, default=_default: device.answers.get(name, default))


def nvmlDeviceGetCudaComputeCapability(_library: Library, device: Any, major: Any, minor: Any) -> None:
    pointed(major).value, pointed(minor).value = required(device.compute_capability)


def _text(buffer: Any, size: Any, text: str) -> None:
    if len(text) + 1 > value_of(size):
        raise NvmlFailure("INSUFFICIENT_SIZE")
    pointed(buffer).value = text.encode(errors="surrogateescape")


def nvmlDeviceGetUUID(_library: Library, device: Any, buffer: Any, size: Any) -> None:
    _text(buffer, size, device.uuid)


def nvmlDeviceGetName(_library: Library, device: Any, buffer: Any, size: Any) -> None:
    parent = getattr(device, "parent", None)
    _text(buffer, size, f"{parent.name} MIG {device.profile}" if parent else device.name)


# Starting, stopping, finding devices


def nvmlInitWithFlags(library: Library, _flags: Any) -> None:
    if library.state.init_error:
        raise NvmlFailure(library.state.init_error)
    library._init_count += 1


def nvmlShutdown(library: Library) -> None:
    library._init_count -= 1


_MESSAGES = {code: name.replace("_", " ").capitalize().encode() for name, code in CODES.items()}


def nvmlErrorString(_library: Library, code: Any) -> bytes:
    return _MESSAGES.get(value_of(code), b"Unknown Error")


def nvmlDeviceGetCount_v2(library: Library, count: Any) -> None:
    pointed(count).value = len(library.state.gpus)


def nvmlDeviceGetHandleByIndex_v2(library: Library, index: Any, handle: Any) -> None:
    if not 0 <= value_of(index) < len(library.state.gpus):
        raise NvmlFailure("INVALID_ARGUMENT")
    device = library.state.gpus[value_of(index)]
    library.check(device, "nvmlDeviceGetHandleByIndex")
    point(handle, library.handle_of(device.uuid))


def nvmlDeviceGetHandleByUUID(library: Library, uuid: Any, handle: Any) -> None:
    wanted = value_of(uuid).decode()
    if wanted not in [one.uuid for card in library.state.gpus for one in (card, *instances(card))]:
        raise NvmlFailure("NOT_FOUND")
    library.check(library.find(wanted), "nvmlDeviceGetHandleByUUID")
    point(handle, library.handle_of(wanted))


def nvmlDeviceGetPciInfo_v3(_library: Library, device: Any, info: Any) -> None:
    info = pointed(info)
    info.domain, info.bus, info.device = device.pci
    info.busId = "{:08X}:{:02X}:{:02X}.0".format(*device.pci).encode()


# Memory and processes


def nvmlDeviceGetMemoryInfo(_library: Library, device: Any, info: Any) -> None:
    info = pointed(info)
    info.total, info.free = required(device.memory_total), required(device.memory_free)
    info.used = info.total - info.free


def nvmlDeviceGetMemoryInfo_v2(library: Library, device: Any, info: Any) -> None:
    nvmlDeviceGetMemoryInfo(library, device, info)
    info = pointed(info)
    info.reserved = 0


def _processes(device: Any, count: Any, infos: Any, *, graphics: bool) -> None:
    parent = getattr(device, "parent", None)
    found = [
        {
            "pid": process.pid,
            "usedGpuMemory": _VALUE_NOT_AVAILABLE if process.memory is None else process.memory,
            "gpuInstanceId": _NO_INSTANCE if process.gpu_instance is None else process.gpu_instance,
            "computeInstanceId": _NO_INSTANCE if process.gpu_instance is None else 0,
        }
        for process in required((parent or device).processes)
        if process.graphics is graphics and (parent is None or process.gpu_instance == device.gpu_instance)
    ]
    fill(infos, count, found)


def nvmlDeviceGetComputeRunningProcesses_v3(_library: Library, device: Any, count: Any, infos: Any) -> None:
    _processes(device, count, infos, graphics=False)


def nvmlDeviceGetGraphicsRunningProcesses_v3(_library: Library, device: Any, count: Any, infos: Any) -> None:
    _processes(device, count, infos, graphics=True)


def nvmlDeviceGetProcessUtilization(library: Library, device: Any, infos: Any, count: Any, last_us: Any) -> None:
    now_us = int(library.now_s * 1e6)
    busy = [process for process in required(device.processes) if process.sm is not None and now_us > value_of(last_us)]
    if not busy:
        raise NvmlFailure("NOT_FOUND")
    fill(infos, count, [{"pid": one.pid, "timeStamp": now_us, "smUtil": one.sm} for one in busy])


# MIG


def nvmlDeviceGetMigMode(_library: Library, device: Any, current: Any, pending: Any) -> None:
    if not device.mig_capable:
        raise NvmlFailure("NOT_SUPPORTED")
    pointed(current).value = pointed(pending).value = int(device.mig is not None)


def nvmlDeviceGetMigDeviceHandleByIndex(library: Library, device: Any, index: Any, handle: Any) -> None:
    if device.mig is None or value_of(index) >= 7:
        raise NvmlFailure("INVALID_ARGUMENT")
    if value_of(index) >= len(device.mig) or device.mig[value_of(index)] is None:
        raise NvmlFailure("NOT_FOUND")
    point(handle, library.handle_of(device.mig[value_of(index)].uuid))


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(library: Library, device: Any, handle: Any) -> None:
    if not hasattr(device, "parent"):
        raise NvmlFailure("INVALID_ARGUMENT")
    point(handle, library.handle_of(device.parent.uuid))


# Utilization and counters


def _utilization_samples(library: Library, device: Any) -> list[tuple[int, int]]:
    """Return the driver's buffer as it is now: (microseconds since the epoch, percent)."""
    if device.mig is not None:
        raise NvmlFailure("NOT_SUPPORTED")
    if device.samples is not None:
        return [(round(seconds * 1e6), int(value)) for seconds, value in device.samples]
    series, period = required(device.utilization), device.sample_period_s
    newest = math.floor(library.now_s / period)
    ends = [number * period for number in range(newest - device.sample_depth + 1, newest + 1)]
    start = library.state.start_s
    return [(round(end * 1e6), round(mean(series, end - period - start, end - start))) for end in ends]


def nvmlDeviceGetSamples(
    library: Library, device: Any, kind: Any, last_us: Any, value_type: Any, count: Any, samples: Any
) -> None:
    if value_of(kind) != 1:  # NVML_GPU_UTILIZATION_SAMPLES
        raise NvmlFailure("NOT_SUPPORTED")
    found = [sample for sample in _utilization_samples(library, device) if sample[0] > value_of(last_us)]
    pointed(value_type).value = _UNSIGNED_INT
    if samples is None:  # asked for the size: that of the buffer, however much of it is new
        pointed(count).value = max(device.sample_depth, len(found))
        return
    if not found:
        raise NvmlFailure("NOT_FOUND")
    found = found[-pointed(count).value :]
    pointed(count).value = len(found)
    for sample, (stamp_us, value) in zip(pointed(samples), found, strict=False):
        sample.timeStamp = stamp_us
        sample.sampleValue.uiVal = value


def nvmlDeviceGetUtilizationRates(library: Library, device: Any, rates: Any) -> None:
    if device.mig is not None:
        raise NvmlFailure("NOT_SUPPORTED")
    told = device.utilization_rate
    pointed(rates).gpu = round(value_at(required(device.utilization), library.elapsed_s)) if told is None else told


# By field id: what is counted, and how many of the counter's units are one of that.
_COUNTERS = {
    74: ("throttled_power", 1e9),
    75: ("throttled_thermal", 1e9),
    83: ("power_watts", 1e3),
    197: ("pcie_tx_bytes_per_second", 1),
    198: ("pcie_rx_bytes_per_second", 1),
}


def _field_value(library: Library, device: Any, field_id: int) -> int:
    told = device.field_values.get(str(field_id))
    if isinstance(told, str):
        raise NvmlFailure(told)
    if told is not None:
        return told
    if field_id not in _COUNTERS:
        raise NvmlFailure("NOT_SUPPORTED")
    quantity, factor = _COUNTERS[field_id]
    return round(factor * integral(required(getattr(device, quantity)), library.elapsed_s))


def nvmlDeviceGetFieldValues(library: Library, device: Any, count: Any, values: Any) -> None:
    for value in list(pointed(values))[: value_of(count)]:
        value.timestamp = round(library.now_s * 1e6)
        value.valueType = _UNSIGNED_LONG_LONG
        if isinstance(odd := device.field_values.get(str(value.fieldId)), dict):
            value.valueType, value.nvmlReturn = odd["type"], 0
            continue
        try:
            value.value.ullVal = _field_value(library, device, value.fieldId)
            value.nvmlReturn = 0
        except NvmlFailure as failure:
            value.nvmlReturn = failure.code


# GPM: every metric is the mean between two samples


def nvmlGpmQueryDeviceSupport(_library: Library, device: Any, support: Any) -> None:
    pointed(support).isSupportedDevice = int(device.gpm is not None)


def nvmlGpmSampleAlloc(library: Library, sample: Any) -> None:
    address = library.new_address()
    library._samples[address] = None
    point(sample, address)


def nvmlGpmSampleFree(library: Library, sample: Any) -> None:
    if address_of(sample) not in library._samples:
        raise NvmlFailure("INVALID_ARGUMENT")
    del library._samples[address_of(sample)]


def nvmlGpmSampleGet(library: Library, device: Any, sample: Any) -> None:
    required(device.gpm)
    library._samples[address_of(sample)] = (device.uuid, library.elapsed_s)


def nvmlGpmMigSampleGet(library: Library, device: Any, gpu_instance: Any, sample: Any) -> None:
    required(device.gpm)
    (uuid,) = [one.uuid for one in instances(device) if one.gpu_instance == value_of(gpu_instance)]
    library._samples[address_of(sample)] = (uuid, library.elapsed_s)


def nvmlGpmMetricsGet(library: Library, request: Any) -> None:
    request = pointed(request)
    first, second = (library._samples.get(address_of(sample)) for sample in (request.sample1, request.sample2))
    if first is None or second is None or first[0] != second[0] or first[1] >= second[1]:
        raise NvmlFailure("INVALID_ARGUMENT")
    owner = library.find(first[0])
    library.check(owner, "nvmlGpmMetricsGet")
    for metric in list(request.metrics)[: request.numMetrics]:
        series = owner.gpm.get(str(metric.metricId))
        metric.nvmlReturn = CODES["NOT_SUPPORTED" if series is None else "SUCCESS"]
        metric.value = 0.0 if series is None else mean(series, first[1], second[1])


# Topology


def nvmlDeviceGetMemoryAffinity(_library: Library, device: Any, _size: Any, mask: Any, _scope: Any) -> None:
    word, bit = divmod(required(device.numa_node), 64)
    pointed(mask)[word] |= 1 << bit


# Events


def nvmlEventSetCreate(library: Library, event_set: Any) -> None:
    address = library.new_address()
    library._event_sets[address] = SimpleNamespace(uuids=set(), seen_s=library.elapsed_s)
    point(event_set, address)


def nvmlEventSetFree(library: Library, event_set: Any) -> None:
    if library._event_sets.pop(address_of(event_set), None) is None:
        raise NvmlFailure("INVALID_ARGUMENT")


def nvmlDeviceRegisterEvents(library: Library, device: Any, _types: Any, event_set: Any) -> None:
    library._event_sets[address_of(event_set)].uuids.add(device.uuid)


def nvmlEventSetWait_v2(library: Library, event_set: Any, data: Any, _timeout_ms: Any) -> None:
    """Give the next event, or none: the package does not wait for one."""
    events = library._event_sets.get(address_of(event_set))
    if events is None:
        raise NvmlFailure("INVALID_ARGUMENT")
    waiting = sorted(
        (at_s, xid, card.uuid)
        for card in library.state.gpus
        if card.uuid in events.uuids
        for at_s, xid in card.xid_events
        if events.seen_s < at_s <= library.elapsed_s
    )
    if not waiting:
        raise NvmlFailure("TIMEOUT")
    events.seen_s, pointed(data).eventData, uuid = waiting[0]
    pointed(data).eventType = 8  # nvmlEventTypeXidCriticalError
    point(pointed(data).device, library.handle_of(uuid))


FUNCTIONS |= {name: function for name, function in globals().items() if name.startswith("nvml")}
ON_DEVICE = {name for name, function in FUNCTIONS.items() if "device" in function.__code__.co_varnames[:2]}
