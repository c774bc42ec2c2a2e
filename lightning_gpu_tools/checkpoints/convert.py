"""Rewrite a checkpoint with clean keys, another root, another precision or as safetensors."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from lightning_gpu_tools.checkpoints.content import (
    DTYPE_OF_STORAGE,
    LIGHTNING_VERSION,
    MANIFEST,
    MODEL_STATES,
    is_lightning_checkpoint,
    put_weights,
)
from lightning_gpu_tools.checkpoints.copying import changed_number
from lightning_gpu_tools.checkpoints.formats.safetensors import DTYPE_OF_SAFETENSORS, TWO_IN_A_BYTE
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, RenamePlan, clean_names, plan_renaming, quoted
from lightning_gpu_tools.checkpoints.key_tree import WRAPPER_SEGMENT, build_tree, counted, is_wrapper, list_groups
from lightning_gpu_tools.checkpoints.split_tensors import LazyTensor
from lightning_gpu_tools.checkpoints.state_dicts import (
    check_numbers,
    check_repetition,
    choose_weights,
    errors_about,
    is_dense,
    others_of_this_model,
    rename_optimizers,
    same_tensors,
    shapes_of,
    weights_in,
    whole_weights,
)
from lightning_gpu_tools.checkpoints.structure import Progress, manifest_of, no_progress
from lightning_gpu_tools.checkpoints.torch_files import (
    NotPlainError,
    read_checkpoint,
    read_weights,
    watched,
    write_checkpoint,
)
from lightning_gpu_tools.checkpoints.unsafe_globals import describe_unread
from lightning_gpu_tools.errors import CheckpointError, CheckpointMismatchError
from lightning_gpu_tools.files import behind_links, writing
from lightning_gpu_tools.units import printable, printable_path

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
_COPIED_BYTES = 1 << 10
_BATCH = 1 << 10
# What torch.save itself writes with. It is private; without it, writing takes longer and more memory.
_ARCHIVE = getattr(torch._C, "PyTorchFileWriter", None)


def write_content(content: Any, path: str, progress: Progress = no_progress) -> None:
    """Write what ``torch.load`` returns; plain tensors one by one, without the rest of their storages."""
    description = io.BytesIO()
    pickler = _Pickler(description, protocol=2)
    try:
        if _ARCHIVE is None:
            raise NotPlainError
        pickler.dump(content)
    except NotPlainError:
        write_checkpoint(content, path)
        return
    advance = progress(sum(block.nbytes for block in pickler.blocks))
    with writing(path) as file, watched(file) as watched_file:
        archive = _ARCHIVE(watched_file)
        try:
            archive.write_record("data.pkl", description.getvalue(), description.tell())
            archive.write_record("byteorder", sys.byteorder, len(sys.byteorder))
            for number, numbers in enumerate(_numbers(pickler.blocks)):
                is_small = len(numbers) <= _COPIED_BYTES
                block = bytes(numbers) if is_small else torch.frombuffer(numbers, dtype=torch.uint8).untyped_storage()
                archive.write_record(f"data/{number}", block, len(numbers))
                advance(len(numbers))
        finally:
            archive.write_end_of_file()


class _Pickler(pickle.Pickler):
    """Writes what ``torch.save`` writes, but only refers to the numbers of tensors.

    The pickler of ``torch.save`` asks in Python of nineteen parts of each tensor whether it is a storage.
    """

    def __init__(self, file: IO[bytes], protocol: int) -> None:
        super().__init__(file, protocol)
        self.blocks: list[torch.Tensor] = []  # in the order of their storages
        self._storages: dict[Any, _Storage] = {}

    def reducer_override(self, value: Any) -> Any:
        """Describe a tensor by its storage, shape and strides."""
        if not isinstance(value, torch.Tensor):
            if torch.is_storage(value) or isinstance(value, torch.TypedStorage):
                raise NotPlainError
            return NotImplemented
        if not _is_plain(value):
            raise NotPlainError
        # Tensors at one place are the same tensor, or another shape of it.
        block = value.data_ptr(), value.numel(), value.dtype
        storage = self._storages.get(block)
        if storage is None:
            kind = _STORAGE_OF_DTYPE.get(value.dtype, torch.UntypedStorage)
            size = value.nbytes if kind is torch.UntypedStorage else value.numel()
            storage = self._storages[block] = _Storage(("storage", kind, str(len(self.blocks)), "cpu", size))
            self.blocks.append(value)
        parts: Any = (storage, 0, tuple(value.shape), value.stride(), False, OrderedDict())
        if value.dtype in _STORAGE_OF_DTYPE:
            return torch._utils._rebuild_tensor_v2, parts
        return torch._utils._rebuild_tensor_v3, (*parts, value.dtype)

    def persistent_id(self, value: Any) -> Any:
        """Refer to a storage."""
        return tuple(value) if type(value) is _Storage else None


class _Storage(tuple[Any, ...]):
    """Stands for the storage of a tensor; its numbers are written later."""

    __slots__ = ()


def write_safetensors(
    weights: Mapping[str, Any], path: str, texts: Mapping[str, str], progress: Progress = no_progress
) -> None:
    """Write weights as safetensors, without its library, which writes in place.

    The format: https://huggingface.co/docs/safetensors#format.
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
        advance = progress(end)
        for numbers in _numbers(value for _, value in order):
            advance(file.write(numbers))


def _is_plain(value: Any) -> bool:
    """Whether a tensor is numbers in a row, their type and a shape, and nothing else."""
    return (
        type(value) in (torch.Tensor, LazyTensor)
        and value.layout is torch.strided
        and value.is_cpu
        and not (value.is_nested or value.is_quantized or value.requires_grad or value.is_conj() or value.is_neg())
        and (type(value) is LazyTensor or not value.__dict__)
        and value.is_contiguous()
    )


def _numbers(values: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of each tensor. Small ones are copied together: one by one they take ten times as long."""
    for (_, is_small), run in itertools.groupby(values, key=lambda value: (value.dtype, value.nbytes <= _COPIED_BYTES)):
        while batch := [*itertools.islice(run, _BATCH if is_small else 1)]:
            flat = [value if value.ndim == 1 else value.reshape(-1) for value in batch]
            together = flat[0] if len(flat) == 1 else torch.cat(flat)
            in_a_row = together.detach().cpu().resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().data
            start = 0
            for value in batch:
                yield in_a_row[start : (start := start + value.nbytes)]


def _fits_safetensors(key: str, value: Any) -> bool:
    # Half of a surrogate pair is no Unicode, and __metadata__ is the format's own entry.
    if key == "__metadata__" or not (key.isascii() or key.encode(errors="ignore").decode() == key):
        return False
    return is_dense(value) and value.dtype in _SAFETENSORS_DTYPES


# Our default, a page: casting less while it is written saves no memory that counts, and is ten times slower.
_SMALL_BYTES = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What to change, by the names of the command's options."""

    entry: str | None = None  # the only one
    wrappers: tuple[str, ...] = ()  # private names such as _orig_mod always go
    keep_prefix: bool = False
    like: str | None = None
    drop_root: str = ""
    add_root: str = ""
    dtype: torch.dtype | None = None  # that of the file
    weights_only: bool = False


def convert(source: str, target: str, changes: Changes, progress: Progress = no_progress) -> str:
    """Write ``target`` from ``source``, as safetensors if it ends in ``.safetensors``, and return what was done.

    If ``target`` is a symbolic link, the link stays and the file that it names is replaced or made.
    """
    as_safetensors, file = target.endswith(".safetensors"), behind_links(target)
    leaves_out_rest = as_safetensors or changes.weights_only
    content, unread = read_weights(source) if leaves_out_rest else (read_checkpoint(source), None)
    entries = weights_in(content, source)
    entry, _ = choose_weights(source, entries, changes.entry)
    others = others_of_this_model(entry, entries)
    only_weights = leaves_out_rest or not entry
    plans: dict[str, RenamePlan] = {}
    converted: dict[str, OrderedDict[str, Any]] = {}
    for name in (entry,) if only_weights else (entry, *others):
        weights = whole_weights(source, entries[name])
        plans[name] = _plan(source, name, weights, content, changes)
        converted[name] = _converted(source, weights, plans[name], changes, as_safetensors)
    plan = plans[entry]
    if as_safetensors:
        write_safetensors(converted[entry], file, _texts(content), progress)
    elif only_weights:
        write_content(converted[entry], file, progress)
    else:
        whole = put_weights(content, converted)
        if is_lightning_checkpoint(content) and entry in MODEL_STATES and "optimizer_states" in content:
            whole["optimizer_states"] = rename_optimizers(content["optimizer_states"], plan)
        write_content(whole, file, progress)
    done = [counted(len(converted[entry]), "weight") + (f" of {quoted(entry)}" if others else ""), plan.describe()]
    if plan.unused:
        done.append(f"left out: {list_groups(plan.unused)}")
    if others:
        named = ", ".join(map(quoted, others))
        done.append(
            f"not those of {named}, for which there is --entry" if only_weights else f"likewise those of {named}"
        )
    if unread is not None:
        done.append(describe_unread(unread.classes))
    where = printable_path(target) if file == target else f"{printable_path(target)}, a link to {printable_path(file)}"
    return f"{where}: {', '.join(filter(None, done))}"


def _plan(path: str, entry: str, weights: Mapping[str, Any], content: Any, changes: Changes) -> RenamePlan:
    source = printable_path(path)
    if changes.like is not None:
        _, wanted = choose_weights(changes.like, weights_in(read_weights(changes.like)[0], changes.like), None)
        with errors_about(source, printable_path(changes.like)):
            return plan_renaming(shapes_of(weights), ModelKeys(shapes=shapes_of(wanted)))
    # Lightning takes off its own wrappers, so there it is an attribute.
    is_lightnings = is_lightning_checkpoint(content) and entry in MODEL_STATES
    around_all = not (changes.keep_prefix or is_lightnings or changes.drop_root.startswith(f"{WRAPPER_SEGMENT}."))
    known = {*changes.wrappers, *manifest_of(content).get("wrappers", ())}
    with errors_about(source):
        names = clean_names(weights, known, around_all=around_all)
    tree = build_tree(weights)
    for wrapper in changes.wrappers:
        node = tree.find(wrapper)
        if node is None or not is_wrapper(node):
            raise CheckpointMismatchError(f"{source}: {_no_wrapper(wrapper, weights)}")
    kept = {key: name for key, name in names.items() if name.startswith(changes.drop_root)}
    if changes.drop_root and not kept:
        root = printable(repr(changes.drop_root))
        raise CheckpointMismatchError(f"{source}: no key begins with {root}, so it cannot be dropped.")
    return RenamePlan(
        renames={key: changes.add_root + name.removeprefix(changes.drop_root) for key, name in kept.items()},
        unused=tuple(key for key in weights if key not in kept),
    )


def _no_wrapper(path: str, weights: Mapping[str, Any]) -> str:
    inside = f"{path}.{WRAPPER_SEGMENT}.".lstrip(".")
    paths = {key[: match.start()] for key in weights for match in re.finditer(rf"\.?\b{WRAPPER_SEGMENT}\.", key)}
    return (
        f"{printable(repr(path))} is no wrapper. No key begins with {printable(repr(inside))}, or there are others "
        f"beside it. That name is at: {list_groups(map(repr, sorted(paths))) or 'no place'}."
    )


def _converted(
    path: str, weights: Mapping[str, Any], plan: RenamePlan, changes: Changes, as_safetensors: bool
) -> OrderedDict[str, Any]:
    """Return the weights with new names and precision; ties stay. Refuse first what takes too much memory."""
    converted = plan.apply(weights)
    check_numbers(path, converted)
    # What is not in a row goes to torch.save, which writes storages once.
    whole = as_safetensors or changes.dtype is not None
    written = {key: value for key, value in converted.items() if is_dense(value) and (whole or value.is_contiguous())}
    check_repetition(path, written)
    if changes.dtype is None:
        return converted
    identity = same_tensors(converted)
    made: dict[Hashable, Any] = {}
    beyond_range = []
    for key, value in converted.items():
        same = identity.get(key, key)
        if same not in made:
            made[same] = value
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not changes.dtype:
                made[same] = _to_dtype(key, value, changes.dtype)
                if changed_number(value, changes.dtype):
                    beyond_range.append(key)
        converted[key] = made[same]
    if beyond_range:
        raise CheckpointError(
            f"{printable_path(path)}: values of {list_groups(beyond_range)} are beyond the range of {changes.dtype} "
            "and would become infinite. Choose a dtype with a larger range, bfloat16 or float64, or leave --dtype out."
        )
    return converted


def _to_dtype(key: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    try:
        if value.numel() * dtype.itemsize <= _SMALL_BYTES or not is_dense(value):
            return value.detach().to(dtype)
        value.new_empty(1).to(dtype)  # refused now, and not in the middle of writing
    except NotImplementedError:
        raise CheckpointError(
            f"Torch cannot convert {printable(key)} from {value.dtype} to {dtype}. Leave --dtype out to keep it."
        ) from None
    return LazyTensor(tuple(value.shape), dtype, lambda: value.detach().to(dtype).contiguous())


def _texts(content: Any) -> dict[str, str]:
    manifest: dict[str, Any] = {"version": 1, "torch": str(torch.__version__)}
    if is_lightning_checkpoint(content) and isinstance(content[LIGHTNING_VERSION], str):
        manifest["lightning"] = content[LIGHTNING_VERSION]
    return {MANIFEST: json.dumps(manifest)}
