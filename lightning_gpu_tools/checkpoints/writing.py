"""All-or-nothing writing of checkpoint files, without a second copy of the weights in memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Hashable, Mapping
from typing import Any, BinaryIO

import torch

from lightning_gpu_tools.checkpoints.formats.safetensors import DTYPE_OF_SAFETENSORS
from lightning_gpu_tools.checkpoints.key_tree import list_groups
from lightning_gpu_tools.checkpoints.state_dicts import is_dense, same_tensors
from lightning_gpu_tools.errors import CheckpointError
from lightning_gpu_tools.files import writing
from lightning_gpu_tools.units import printable_path

_SAFETENSORS_DTYPES = {
    getattr(torch, dtype): name
    for name, dtype in DTYPE_OF_SAFETENSORS.items()
    if hasattr(torch, dtype)  # F8_E8M0 since torch 2.7
}


def write_checkpoint(content: Any, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint with ``torch.save``, replacing the file in one step."""
    with writing(path) as file, _Watched(file) as watched:
        torch.save(content, watched)


def write_safetensors(weights: Mapping[str, Any], path: str) -> None:
    """Write weights as safetensors. Does not use the library safetensors, which writes in place.

    For the format, see https://huggingface.co/docs/safetensors#format.
    """
    # Half of a surrogate pair is not valid Unicode, and __metadata__ is the format's own entry.
    unfit = [
        key
        for key, value in weights.items()
        if key == "__metadata__"
        or key.encode(errors="ignore").decode() != key
        or not (is_dense(value) and value.dtype in _SAFETENSORS_DTYPES)
    ]
    if unfit:
        raise CheckpointError(
            f"{printable_path(path)}: safetensors cannot store {list_groups(unfit)}. It stores only plain tensors with "
            "valid UTF-8 names other than __metadata__. To keep them, use a suffix other than .safetensors."
        )
    same = same_tensors(weights)
    first: dict[Hashable, str] = {}
    for key in weights:
        first.setdefault(same.get(key, key), key)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Largest elements first, so that each tensor begins at a multiple of its element size.
    order = sorted(((key, weights[key]) for key in first.values()), key=lambda item: -item[1].element_size())
    end = 0
    for key, value in order:
        start, end = end, end + value.nbytes
        header[key] = {
            "dtype": _SAFETENSORS_DTYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing(path) as file, torch.no_grad():
        file.write(struct.pack("<Q", len(text)) + text)
        for _, value in order:
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


class _Watched:
    """A file for torch to write to. If that fails, the block ends with the disk's error instead of torch's own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self._error = self._error or error
            raise

    def flush(self) -> None:
        """Do nothing: the file is flushed once, after the block."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        if self._error is not None:
            raise self._error from None
