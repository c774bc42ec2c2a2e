"""NumPy arrays in pickles and ``.npy`` files, described like tensors. Never the ones that hold Python objects."""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

from lightning_gpu_tools.checkpoints.structure import BYTES_OF_DTYPE, ArrayNumbers, Opaque, TensorInfo, is_shape

ARRAY = "numpy.ndarray"
# numpy.dtype.str after the byte order: https://numpy.org/doc/stable/reference/arrays.interface.html
_DTYPE_OF_CODE = {
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"i{size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{f"u{size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    **{f"c{size}": f"complex{8 * size}" for size in (8, 16)},
    "b1": "bool",
}
_ORDERS = ("|", "<" if sys.byteorder == "little" else ">")
_MAX_DIMENSIONS = 64  # the limit of NumPy 2
# The state of a numpy.dtype without fields: version, byte order, and what only other types have.
_PLAIN_DTYPE = (None, None, None, -1, -1, 0)


def dtype_of_array(order: Any, code: Any) -> str:
    """Return torch's name for a type of numbers in this machine's byte order; ``""`` for any other type."""
    return _DTYPE_OF_CODE.get(code, "") if isinstance(code, str) and order in _ORDERS else ""


def strides_of(shape: Sequence[int], *, is_fortran: bool) -> tuple[int, ...]:
    """Return the strides of a contiguous array, in elements."""
    sizes = shape if is_fortran else tuple(reversed(shape))
    strides = (1, *itertools.accumulate(sizes, operator.mul))[: len(shape)]
    return strides if is_fortran else strides[::-1]


def array_of_state(state: Any) -> TensorInfo | None:
    """Return the array that gets this state by ``ndarray.__setstate__``; ``None`` if torch cannot have it."""
    match state:
        case (1, shape, dtype, bool(is_fortran), data):
            return _array(dtype, shape, data, is_fortran=is_fortran)
    return None


def array_of_buffer(arguments: Sequence[Any]) -> TensorInfo | None:
    """Return the array that ``numpy._core.numeric._frombuffer`` would build; ``None`` if torch cannot have it."""
    match arguments:
        case (data, dtype, shape, "C" | "F" as order) | (data, dtype, shape, "C" | "F" as order, None):
            return _array(dtype, shape, data, is_fortran=order == "F")
    return None


def _array(dtype: Any, shape: Any, data: Any, *, is_fortran: bool) -> TensorInfo | None:
    name = _dtype(dtype)
    if not name or not isinstance(shape, tuple) or len(shape) > _MAX_DIMENSIONS or not is_shape(shape):
        return None
    match data:
        case Opaque(kind="_codecs.encode", state=(str(text), "latin1")):  # bytes in protocol 2
            data = text
        case Opaque(kind="builtins.bytes", state=()):
            data = b""
    if isinstance(data, str):
        try:
            data = data.encode("latin1")
        except UnicodeEncodeError:
            return None
    numel = math.prod(shape)
    if not isinstance(data, (bytes, bytearray)) or len(data) != numel * BYTES_OF_DTYPE[name]:
        return None
    numbers = ArrayNumbers("", name, "cpu", numel, data)
    return TensorInfo(name, shape, numbers, 0, strides_of(shape, is_fortran=is_fortran), ARRAY)


def _dtype(dtype: Any) -> str:
    """Return the name of a described ``numpy.dtype(code, align, copy)`` with its state."""
    if isinstance(dtype, Opaque) and dtype.kind == "numpy.dtype":
        match dtype.state:
            case (str(code), _, _, (3, order, *rest)) if tuple(rest) == _PLAIN_DTYPE:
                return dtype_of_array(order, code)
    return ""
