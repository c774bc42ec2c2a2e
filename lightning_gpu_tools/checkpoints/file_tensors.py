"""The numbers of an open file as tensors, mapped instead of read."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, BinaryIO

import torch

from lightning_gpu_tools.checkpoints.faults import Fault
from lightning_gpu_tools.units import printable


def name_of_open_file(file: BinaryIO) -> str | None:
    """Return a path by which to map an open file, even if another is at its old path now."""
    if isinstance(file, io.BytesIO):
        return None
    if sys.platform == "win32":  # where an open file cannot be replaced
        return file.name
    name = f"/proc/self/fd/{file.fileno()}"
    return name if os.path.exists(name) else None


def mapped_bytes(file: BinaryIO) -> torch.Tensor:
    """Return all of an open file: mapped where that is possible, else read."""
    size_bytes = file.seek(0, os.SEEK_END)
    source = name_of_open_file(file)
    if source is not None:
        return torch.from_file(source, shared=False, size=size_bytes, dtype=torch.uint8)
    file.seek(0)
    return bytes_of(bytearray(file.read()))


def bytes_of(data: bytearray) -> torch.Tensor:
    """Return bytes as a tensor of them, without a copy."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")


def moved(tensor: torch.Tensor, map_location: Any) -> torch.Tensor:
    """Return a tensor on the device that is asked for by name, if any is."""
    is_device = isinstance(map_location, (str, torch.device)) and str(map_location) != "cpu"
    return tensor.to(map_location) if is_device else tensor


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name; raise a :class:`Fault` if only a newer torch has it."""
    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None:
        raise needs_newer_torch(f"torch.{name}")
    return dtype


def needs_newer_torch(name: str) -> Fault:
    """Return the fault of a file that needs a newer torch."""
    return Fault(f"holds {printable(name)}, which torch {torch.__version__} does not know", "Use a newer torch.")
