"""Values of C functions: return codes, quantities over time, and arguments as ctypes passes them."""

import ctypes
import math
from typing import Any

# nvml.h, nvmlReturn_t
CODES = {
    "SUCCESS": 0,
    "UNINITIALIZED": 1,
    "INVALID_ARGUMENT": 2,
    "NOT_SUPPORTED": 3,
    "NO_PERMISSION": 4,
    "NOT_FOUND": 6,
    "INSUFFICIENT_SIZE": 7,
    "DRIVER_NOT_LOADED": 9,
    "TIMEOUT": 10,
    "FUNCTION_NOT_FOUND": 13,
    "GPU_IS_LOST": 15,
    "LIB_RM_VERSION_MISMATCH": 18,
    "UNKNOWN": 999,
}


class NvmlFailure(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.code = CODES[name]


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


def value_of(argument: Any) -> Any:
    """The Python value of an argument passed by value: c_uint(3), 3, c_char_p(b'x')."""
    return getattr(argument, "value", argument)


def pointed(argument: Any) -> Any:
    """Return the target of byref(x); arrays are passed as they are."""
    return getattr(argument, "_obj", argument)


def address_of(handle: Any) -> int:
    return ctypes.cast(pointed(handle), ctypes.c_void_p).value or 0


def point(pointer: Any, address: int) -> None:
    ctypes.c_void_p.from_buffer(pointed(pointer)).value = address


def required(value: Any) -> Any:
    if value is None:
        raise NvmlFailure("NOT_SUPPORTED")
    return value


def fill(infos: Any, count: Any, found: list[dict[str, Any]]) -> None:
    """Answer with a list, as the functions do that are first asked for the size and then for the content."""
    space, pointed(count).value = pointed(count).value, len(found)
    if len(found) > space:
        raise NvmlFailure("INSUFFICIENT_SIZE")
    for info, fields in zip(pointed(infos) or (), found, strict=False):
        for name, value in fields.items():
            setattr(info, name, value)
