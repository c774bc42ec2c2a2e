"""Reading and writing checkpoint files with torch: safely, to the CPU, and with errors that say what is the matter."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch

from lightning_gpu_tools.checkpoints.atomic_file import local_copy, writing
from lightning_gpu_tools.checkpoints.formats import Fault, broken, comes_from_contents, identify
from lightning_gpu_tools.checkpoints.structure import find_damage, read_structure
from lightning_gpu_tools.checkpoints.unsafe_globals import beyond_plain_data, explain_blocked
from lightning_gpu_tools.errors import CheckpointError, UnsafeCheckpointError
from lightning_gpu_tools.quantities import printable, printable_path


def read_checkpoint(
    path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True, verify: bool = False
) -> Any:
    """Return what a checkpoint file holds.

    The tensors of a local file are mapped, not read: they cost no memory until they are used, and the pages belong to
    the file. Copy what is to outlive a change of that file.

    Args:
        path: A local path, or any URL that fsspec knows.
        map_location: As for ``torch.load``.
        weights_only: Whether to refuse everything that is not plain data.
        verify: Whether to read the whole file first and compare it with its checksums.

    Raises:
        CheckpointNotFoundError: There is nothing at ``path``.
        BrokenCheckpointError: The file is no checkpoint, or damaged.
        UnsafeCheckpointError: It holds more than plain data.
        OSError: It cannot be read.
    """
    with local_copy(path) as local:
        if verify:
            _verify(local)
        return _read(local, map_location, weights_only)


def verify_checkpoint(path: str | os.PathLike[str]) -> None:
    """Read a whole file and compare it with the checksums in it.

    Raises:
        BrokenCheckpointError: It is damaged.
    """
    with local_copy(path) as local:
        _verify(local)


def _verify(path: str) -> None:
    damage = find_damage(path)
    if damage is not None:
        raise broken(path, Fault(f"is damaged: {damage}", "Restore it, or use an earlier checkpoint."))


def write_checkpoint(
    content: Any, path: str | os.PathLike[str], progress: Callable[[int], None] = lambda _: None
) -> None:
    """Write a file so that at every moment ``path`` holds the old complete one or the new complete one.

    Tensors are streamed one by one, so that saving needs no second copy of them.

    Args:
        content: Anything that ``torch.save`` takes.
        path: A local path, or any URL that fsspec knows.
        progress: Called with the number of bytes that were written since the last call.

    Raises:
        OSError: The file system refuses; ``filename`` is the path.
    """
    with writing(path) as file:
        _save(content, file, progress)


def _read(path: str, map_location: Any, weights_only: bool) -> Any:
    format_ = identify(path)
    if format_ == "safetensors":
        return _read_safetensors(path, map_location)
    try:
        if path.endswith(".safetensors"):  # torch.load goes by that name
            with open(path, "rb") as file:
                return torch.load(file, map_location=map_location, weights_only=weights_only)
        return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=format_ == "zip")
    except Exception as error:  # damaged or hostile bytes make torch raise anything
        if "torch.distributed.tensor" in str(error) and "torch.distributed.tensor" not in sys.modules:
            importlib.import_module("torch.distributed.tensor")  # what torch asks for, to know DTensors as plain data
            return _read(path, map_location, weights_only)
        _explain(path, error, weights_only, map_location)
        raise


def _explain(path: str, error: Exception, weights_only: bool, map_location: Any) -> None:
    """Raise the error that says what is the matter with the file; return where torch's own says it best."""
    structure = read_structure(path)
    if weights_only:
        allowed = {f"{item.__module__}.{item.__qualname__}" for item in _allowed_classes()}
        foreign = beyond_plain_data(structure.globals)
        blocked = [name for name in foreign if name not in allowed]
        if blocked:
            raise UnsafeCheckpointError(explain_blocked(path, blocked)) from None
        if foreign and isinstance(error, pickle.UnpicklingError):  # each name is allowed, what is done with it is not
            reason = re.search(r"WeightsUnpickler error:\s*(.*)", str(error))
            raise UnsafeCheckpointError(explain_blocked(path, foreign, reason[1] if reason else "")) from None
    asked_for = not weights_only or map_location != "cpu"  # then it may be the caller's class or device that fails
    if asked_for or isinstance(error, MemoryError) or not comes_from_contents(error):
        return
    fault = Fault(
        f"is damaged: its contents cannot be put together ({type(error).__name__})",
        "Restore it from where it came from, or use an earlier checkpoint.",
    )
    raise broken(path, fault) from None


def _allowed_classes() -> list[Any]:
    return [item[0] if isinstance(item, tuple) else item for item in torch.serialization.get_safe_globals()]


def _read_safetensors(path: str, map_location: Any) -> OrderedDict[str, Any]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise CheckpointError(
            f"{printable_path(path)} is a safetensors file. Reading it needs: "
            "pip install 'lightning-gpu-tools[safetensors]'"
        ) from None
    structure = read_structure(path)
    device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
    try:
        weights = OrderedDict(load_file(path, device=str(device)))
    except SafetensorError as error:
        raise broken(path, Fault(f"is a damaged safetensors file ({printable(error, 300)})")) from None
    restore_metadata(weights, structure.metadata)
    return weights


def restore_metadata(weights: OrderedDict[str, Any], texts: Mapping[str, str]) -> None:
    """Put back the module versions and the second names of tied weights that ``convert`` wrote as text."""
    try:
        versions = json.loads(texts.get("module_versions", "null"))
        tied = json.loads(texts.get("tied", "{}"))
    except ValueError:  # texts of that name by another program
        return
    if isinstance(versions, dict):
        weights._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    if isinstance(tied, dict):
        weights.update((key, weights[other]) for key, other in tied.items() if other in weights)


class _Recorder:
    """A file for ``torch.save`` that remembers why writing failed; torch itself reports only that it did."""

    def __init__(self, file: BinaryIO, progress: Callable[[int], None]) -> None:
        self._file = file
        self._progress = progress
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self._progress(written)
        return written

    def flush(self) -> None:
        self._file.flush()


def _save(content: Any, file: Any, progress: Callable[[int], None]) -> None:
    recorder = _Recorder(file, progress)
    try:
        torch.save(content, recorder)  # type: ignore[arg-type]
    except Exception:  # torch hides the file's own error behind one of its own; nothing is swallowed here
        if recorder.error is not None:
            raise recorder.error from None
        raise
