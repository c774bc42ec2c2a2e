"""Pickles of NumPy arrays that were written without torch, such as Detectron2's model zoo."""

from __future__ import annotations

import pickle
import re
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.content import all_state_dicts, unopened_objects
from lightning_gpu_tools.checkpoints.faults import Fault
from lightning_gpu_tools.checkpoints.file_kinds import HEAD_BYTES, other_file
from lightning_gpu_tools.checkpoints.formats import torch_legacy
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.checkpoints.pickle_structure import StructureReader
from lightning_gpu_tools.checkpoints.structure import Structure
from lightning_gpu_tools.errors import UnsafeCheckpointError
from lightning_gpu_tools.units import printable_path

NAME = "pickle"
SUFFIXES = ()  # .pkl is the end of any pickle's name
HOLDS_ONLY_WEIGHTS = False
_START = re.compile(rb"\x80[\x02-\x05]")


def recognizes(head: bytes) -> bool:
    """Return whether a file begins like a pickle, but not like torch's."""
    return _START.match(head) is not None and not torch_legacy.recognizes(head)


def describe(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Describe the pickle; refuse it unless there are sets of arrays in it."""
    file.seek(0)
    other = other_file(path, size_bytes, file.read(HEAD_BYTES))
    file.seek(0)
    reader = StructureReader(file, size_bytes, encoding="latin1")  # Python 2 wrote bytes as text
    try:
        content = reader.load()
    except Fault:  # tensors, which need torch's own files
        raise other from None
    if reader.storages or not all_state_dicts(content):
        raise other
    return Structure(file, path, size_bytes, NAME, content, reader.globals, set(), filled=reader.filled)


def load(structure: Structure, map_location: Any, weights_only: bool) -> Any:
    """Return the described content with its arrays as tensors, or let pickle open it, with the arrays themselves."""
    from lightning_gpu_tools.checkpoints.torch_loading import NotPlainError, content_with_arrays

    if not weights_only:
        structure.file.seek(0)
        return pickle.load(structure.file, encoding="latin1")
    try:
        return content_with_arrays(structure)
    except NotPlainError:
        raise UnsafeCheckpointError(
            f"{printable_path(structure.path)} holds more than arrays and plain data, so it was not opened. No code in "
            f"it has run.\n  holds objects of: {listed(sorted(unopened_objects(structure.content)))}."
        ) from None
