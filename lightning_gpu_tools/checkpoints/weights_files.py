"""Files for ``torch.load`` and of safetensors, written in seconds even if they hold 300,000 weights."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import IO, Any

import torch

from lightning_gpu_tools.checkpoints.atomic_file import writing
from lightning_gpu_tools.checkpoints.descriptions import DTYPE_OF_STORAGE
from lightning_gpu_tools.checkpoints.key_groups import list_groups
from lightning_gpu_tools.checkpoints.model_keys import is_packed, shape_of
from lightning_gpu_tools.checkpoints.split_tensors import LazyTensor, put_in_place
from lightning_gpu_tools.checkpoints.state_dicts import place_of, same_tensors
from lightning_gpu_tools.checkpoints.structure import DTYPE_OF_SAFETENSORS, TWO_IN_A_BYTE
from lightning_gpu_tools.checkpoints.torch_files import watched, write_checkpoint
from lightning_gpu_tools.errors import CheckpointError
from lightning_gpu_tools.units import printable_path

_STORAGE_OF_DTYPE = {
    getattr(torch, dtype): getattr(torch, storage)
    for storage, dtype in DTYPE_OF_STORAGE.items()
    if not storage.startswith(("Q", "Untyped"))
}
_SAFETENSORS_DTYPES = {
    getattr(torch, dtype): name
    for name, dtype in DTYPE_OF_SAFETENSORS.items()
    if hasattr(torch, dtype)  # F8_E8M0 since torch 2.7, F4 since 2.8
}
# Our defaults: a copy of a MiB costs nothing.
_SMALL_BYTES = 1 << 10
_BATCH = 1 << 10
# What torch.save itself writes with. It is private; without it, writing only takes longer, and more memory.
_ARCHIVE = getattr(torch._C, "PyTorchFileWriter", None)
Progress = Callable[[int], None]


def write_content(content: Any, path: str, progress: Progress = lambda _: None) -> None:
    """Write what ``torch.load`` returns, each tensor without what else is in its storage, and one at a time.

    Args:
        content: Anything that ``torch.save`` takes.
        path: A local path, or any URL that fsspec knows.
        progress: Called with the number of bytes that were written since the last call.

    Raises:
        OSError: The file system refuses; ``filename`` is the path.
    """
    description = io.BytesIO()
    pickler = _Pickler(description, protocol=2)
    try:
        if _ARCHIVE is None:
            raise _NotPlainError
        pickler.dump(content)
    except _NotPlainError:
        write_checkpoint(_alone(content), path, progress)
        return
    with writing(path) as file, watched(file, progress) as watched_file:
        archive = _ARCHIVE(watched_file)
        try:
            archive.write_record("data.pkl", description.getvalue(), description.tell())
            archive.write_record("byteorder", sys.byteorder, len(sys.byteorder))
            for number, numbers in enumerate(_numbers(pickler.blocks)):
                archive.write_record(f"data/{number}", bytes(numbers), len(numbers))
        finally:
            archive.write_end_of_file()


class _NotPlainError(Exception):
    """Something is more than a tensor that is numbers in a row."""


class _Pickler(pickle.Pickler):
    """Writes what ``torch.save`` writes, but only refers to the numbers of tensors.

    The pickler of ``torch.save`` asks in Python of nineteen parts of each tensor whether it is a storage.

    Attributes:
        blocks: The tensors, in the order of their storages.
    """

    def __init__(self, file: IO[bytes], protocol: int) -> None:
        super().__init__(file, protocol)
        self.blocks: list[torch.Tensor] = []
        self._storages: dict[Any, _Storage] = {}

    def reducer_override(self, value: Any) -> Any:
        """Describe a tensor by its storage, shape and strides."""
        if not isinstance(value, torch.Tensor):
            if torch.is_storage(value) or isinstance(value, torch.TypedStorage):
                raise _NotPlainError
            return NotImplemented
        if not _is_plain(value):
            raise _NotPlainError
        # Tensors at one place are the same tensor, or another shape of it.
        block = value.data_ptr(), value.numel(), value.dtype
        storage = self._storages.get(block)
        if storage is None:
            kind, key = _STORAGE_OF_DTYPE[value.dtype], str(len(self.blocks))
            storage = self._storages[block] = _Storage(("storage", kind, key, "cpu", value.numel()))
            self.blocks.append(value)
        form = tuple(value.shape), value.stride()
        return torch._utils._rebuild_tensor_v2, (storage, 0, *form, False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        """Refer to a storage as ``torch.load`` wants it."""
        return tuple(value) if type(value) is _Storage else None


class _Storage(tuple[Any, ...]):
    """What stands for the storage of a tensor; its numbers are written later."""

    __slots__ = ()


def write_safetensors(
    weights: Mapping[str, Any], path: str, texts: Mapping[str, str], progress: Progress = lambda _: None
) -> None:
    """Write weights as safetensors, without its library, which writes in place.

    The format: https://huggingface.co/docs/safetensors#format.

    Args:
        weights: By name; with their ``_metadata``, if they have it.
        path: A local path, or any URL that fsspec knows.
        texts: What else is to be noted in the file; ``restore_metadata`` reads what this function adds.
        progress: Called with the number of bytes that were written since the last call.

    Raises:
        CheckpointError: Not all weights are plain tensors.
        OSError: The file system refuses; ``filename`` is the path.
    """
    unfit = [key for key, value in weights.items() if not _fits_safetensors(key, value)]
    if unfit:
        raise CheckpointError(
            f"{printable_path(path)}: safetensors holds plain tensors only, not {list_groups(unfit)}, "
            "under names in UTF-8 other than __metadata__. Choose another suffix than .safetensors to keep them."
        )
    same = same_tensors(weights)
    first: dict[Hashable, str] = {}
    leaders = {key: first.setdefault(same.get(key, key), key) for key in weights}
    tied = {key: leader for key, leader in leaders.items() if key != leader}
    more = {"module_versions": getattr(weights, "_metadata", None), "tied": tied}
    more_texts = {name: json.dumps(value) for name, value in more.items() if value}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **texts, **more_texts}}
    # The largest elements first, so that each tensor begins at a multiple of its element size.
    order = sorted(((key, weights[key]) for key in first.values()), key=lambda item: -item[1].element_size())
    end = 0
    for key, value in order:
        start, end = end, end + value.nbytes
        dtype, shape = _SAFETENSORS_DTYPES[value.dtype], list(value.shape)
        if DTYPE_OF_SAFETENSORS[dtype] == TWO_IN_A_BYTE:
            shape[-1] *= 2
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing(path) as file, torch.no_grad():
        file.write(struct.pack("<Q", len(text)) + text)
        for numbers in _numbers(value for _, value in order):
            progress(file.write(numbers))


def _alone(content: Any) -> Any:
    """Return content with tensors of their own in place of parts of larger storages, which ``torch.save`` would write.

    What is one tensor under several names stays one.
    """
    copies: dict[Hashable, torch.Tensor] = {}

    def own(leaf: Any) -> Any:
        if not has_rest(leaf):
            return leaf
        same = place_of(leaf)
        if same not in copies:
            copies[same] = leaf.detach().clone()
        return copies[same]

    return put_in_place(content, own)


def has_rest(value: Any) -> bool:
    """Whether a tensor is a part of a larger storage."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_nested or value.is_quantized:
        return False
    return value.layout is torch.strided and value.untyped_storage().nbytes() > value.nbytes


def _is_plain(value: Any) -> bool:
    """Whether shape, type and numbers in a row are all that there is to a tensor."""
    return (
        type(value) in (torch.Tensor, LazyTensor)
        and value.dtype in _STORAGE_OF_DTYPE
        and value.layout is torch.strided
        and value.is_cpu
        and not (value.is_nested or value.requires_grad or value.is_conj() or value.is_neg())
        and (type(value) is LazyTensor or not value.__dict__)
        and value.is_contiguous()
    )


def _numbers(values: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of each tensor. Small ones are copied together: one by one they take ten times as long."""
    for (_, is_small), run in itertools.groupby(values, key=lambda value: (value.dtype, value.nbytes <= _SMALL_BYTES)):
        while batch := [*itertools.islice(run, _BATCH if is_small else 1)]:
            flat = [value if value.ndim == 1 else value.reshape(-1) for value in batch]
            together = flat[0] if len(flat) == 1 else torch.cat(flat)
            in_a_row = together.detach().cpu().resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().data
            start = 0
            for value in batch:
                yield in_a_row[start : (start := start + value.nbytes)]


def _fits_safetensors(key: str, value: Any) -> bool:
    # Half of a surrogate pair is no Unicode; the second is the name of the format's own entry.
    if key == "__metadata__" or not (key.isascii() or key.encode(errors="ignore").decode() == key):
        return False
    if shape_of(value) is None or value.layout is not torch.strided or value.is_meta or is_packed(value):
        return False
    return value.dtype in _SAFETENSORS_DTYPES
