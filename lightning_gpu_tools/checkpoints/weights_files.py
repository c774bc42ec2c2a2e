"""Files of weights alone, written in seconds even if they are 300,000: for ``torch.load``, and as safetensors."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import math
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import IO, Any

import torch

from lightning_gpu_tools.checkpoints.atomic_file import writing
from lightning_gpu_tools.checkpoints.key_groups import list_groups
from lightning_gpu_tools.checkpoints.model_keys import shape_of
from lightning_gpu_tools.checkpoints.pickle_structure import DTYPE_OF_STORAGE
from lightning_gpu_tools.checkpoints.split_tensors import LazyTensor
from lightning_gpu_tools.checkpoints.state_dicts import same_tensors
from lightning_gpu_tools.checkpoints.structure import DTYPE_OF_SAFETENSORS, TWO_IN_A_BYTE
from lightning_gpu_tools.checkpoints.torch_files import watched, write_checkpoint
from lightning_gpu_tools.errors import CheckpointError
from lightning_gpu_tools.units import printable_path

_STORAGE_OF_DTYPE = {
    getattr(torch, dtype): f"ctorch\n{storage}\n".encode()
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
# What torch.save itself writes with. It is private; without it, many weights only take longer.
_ARCHIVE = getattr(torch._C, "PyTorchFileWriter", None)
Progress = Callable[[int], None]


def write_weights(weights: OrderedDict[str, Any], path: str, progress: Progress = lambda _: None) -> None:
    """Write weights so that ``torch.load`` returns them, each without what else is in its storage.

    Args:
        weights: By name; with their ``_metadata``, if they have it.
        path: A local path, or any URL that fsspec knows.
        progress: Called with the number of bytes that were written since the last call.

    Raises:
        OSError: The file system refuses; ``filename`` is the path.
    """
    versions = getattr(weights, "_metadata", {})
    is_plain = all(map(_is_plain, weights.values())) and all(map(_are_integers, versions.values()))
    if _ARCHIVE is None or not is_plain:
        write_checkpoint(alone(weights), path, progress)
        return
    # Tensors at one place are the same tensor, or another shape of it.
    blocks = {_block(value): value for value in weights.values()}
    keys = {block: _text(str(number)) for number, block in enumerate(blocks)}
    _write_archive(path, b"".join(_pickled(weights, keys)), blocks.values(), progress)


def write_content(content: Any, path: str, progress: Progress = lambda _: None) -> None:
    """Write anything that ``torch.save`` takes; what is made of several parts is put together one tensor at a time.

    Args:
        content: What to write.
        path: A local path, or any URL that fsspec knows.
        progress: Called with the number of bytes that were written since the last call.

    Raises:
        OSError: The file system refuses; ``filename`` is the path.
    """
    description = io.BytesIO()
    pickler = _Pickler(description, protocol=2)
    with contextlib.suppress(_NotPlainError):
        pickler.dump(content)
        if _ARCHIVE is not None and any(type(value) is LazyTensor for value in pickler.blocks.values()):
            _write_archive(path, description.getvalue(), pickler.blocks.values(), progress)
            return
    write_checkpoint(content, path, progress)


class _NotPlainError(Exception):
    """A tensor is more than numbers in a row."""


class _Pickler(pickle.Pickler):
    """Writes what ``torch.save`` writes, but only refers to the numbers of tensors.

    Attributes:
        blocks: The tensors, in the order of their storages.
    """

    def __init__(self, file: IO[bytes], protocol: int) -> None:
        super().__init__(file, protocol)
        self.blocks: dict[Any, torch.Tensor] = {}
        self._numbers: dict[Any, _Storage] = {}

    def reducer_override(self, value: Any) -> Any:
        """Describe a tensor by its storage, shape and strides."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if not _is_plain(value) or has_rest(value):
            raise _NotPlainError
        block = _block(value)
        self.blocks.setdefault(block, value)
        storage = self._numbers.setdefault(block, _Storage(str(len(self._numbers)), value))
        shape = tuple(value.shape), value.stride()
        return torch._utils._rebuild_tensor_v2, (storage, 0, *shape, False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        """Refer to a storage as ``torch.load`` wants it."""
        return value.reference if type(value) is _Storage else None


class _Storage:
    """The storage of a tensor, to be written later."""

    def __init__(self, key: str, value: torch.Tensor) -> None:
        kind = _STORAGE_OF_DTYPE[value.dtype].split()[1].decode()
        self.reference = ("storage", getattr(torch, kind), key, "cpu", value.numel())


def _write_archive(path: str, description: bytes, blocks: Iterable[torch.Tensor], progress: Progress) -> None:
    with writing(path) as file, watched(file, progress) as watched_file:
        archive = _ARCHIVE(watched_file)  # type: ignore[misc]
        try:
            archive.write_record("data.pkl", description, len(description))
            archive.write_record("byteorder", sys.byteorder, len(sys.byteorder))
            for number, numbers in enumerate(_numbers(blocks)):
                archive.write_record(f"data/{number}", bytes(numbers), len(numbers))
        finally:
            archive.write_end_of_file()


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


def alone(weights: OrderedDict[str, Any]) -> OrderedDict[str, Any]:
    """Return weights without the rest of the storages that they are parts of, which ``torch.save`` would write, too.

    What is one tensor under several names stays one.
    """
    parts = {key: value for key, value in weights.items() if has_rest(value)}
    same = same_tensors(parts)
    copies: dict[Hashable, torch.Tensor] = {}
    changed = copy.copy(weights)
    for key, value in parts.items():
        if same.get(key, key) not in copies:
            copies[same.get(key, key)] = value.detach().clone()
        changed[key] = copies[same.get(key, key)]
    return changed


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


def _are_integers(entry: Mapping[str, Any]) -> bool:
    return all(type(value) is int for value in entry.values())


def _block(value: torch.Tensor) -> tuple[int, int, torch.dtype]:
    return value.data_ptr(), value.numel(), value.dtype


def _pickled(weights: Mapping[str, Any], keys: Mapping[Any, bytes]) -> Iterator[bytes]:
    """Yield the pickle of plain weights.

    The pickler of ``torch.save`` asks in Python of nineteen parts of each tensor whether it is a storage.

    Args:
        weights: By name.
        keys: The pickled key of each storage.
    """
    memo: dict[bytes, bytes] = {}

    def once(program: bytes) -> bytes:
        """Push what is needed again and again; when it is pushed first, it gets a name."""
        if program in memo:
            return memo[program]
        name = bytes([len(memo)])
        memo[program] = pickle.BINGET + name
        return program + pickle.BINPUT + name

    def around_name(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[bytes, bytes]:
        """Push a tensor; what comes before and after the key of its storage."""
        begin = once(b"ctorch._utils\n_rebuild_tensor_v2\n") + b"((" + once(_text("storage"))
        begin += once(_STORAGE_OF_DTYPE[dtype])
        end = once(_text("cpu")) + _integer(math.prod(shape)) + b"tQ" + _integer(0)
        return begin, end + _integers(shape) + _integers(strides) + pickle.NEWFALSE + once(mapping) + b")RtR"

    mapping = b"ccollections\nOrderedDict\n"
    yield pickle.PROTO + b"\2" + once(mapping) + b")R("
    known: dict[Any, tuple[bytes, bytes]] = {}
    for key, value in weights.items():
        form = value.dtype, value.shape, value.stride()
        begin, end = known.get(form) or around_name(*form)
        yield _text(key) + begin + keys[_block(value)] + end
        if form not in known:
            known[form] = around_name(*form)  # all of it has names by now
    yield b"u"
    if hasattr(weights, "_metadata"):
        yield pickle.dumps({"_metadata": weights._metadata}, 2)[2:-1] + b"b"
    yield b"."


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<L", len(data)) + data


def _integer(number: int) -> bytes:
    return pickle.BININT1 + bytes([number]) if number < 256 else pickle.dumps(number, 2)[2:-1]


def _integers(numbers: Iterable[int]) -> bytes:
    return b"(" + b"".join(map(_integer, numbers)) + b"t"


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
    if shape_of(value) is None or value.layout is not torch.strided or value.is_meta:
        return False
    return value.dtype in _SAFETENSORS_DTYPES
