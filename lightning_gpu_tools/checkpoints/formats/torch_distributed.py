"""Folders by torch.distributed.checkpoint, including Lightning's. Runs no code."""

import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints import formats
from lightning_gpu_tools.checkpoints.content import LIGHTNING_VERSION
from lightning_gpu_tools.checkpoints.inert_pickle import InertUnpickler, Opaque
from lightning_gpu_tools.checkpoints.structure import (
    BYTES_OF_DTYPE,
    MAX_DEPTH,
    RESTORE,
    Fault,
    Part,
    Record,
    Structure,
    TensorInfo,
    are_sizes,
    damaged,
    is_shape,
)
from lightning_gpu_tools.units import printable

FILES = PART = re.compile(r"__\d+_\d+\.distcp|(__\d+)?\.metadata")
_METADATA = ".metadata"
_EXTRA = "meta.pt"
DAMAGE = "its .metadata does not describe a checkpoint"


@dataclass(frozen=True, slots=True)
class _Place:
    """The place where ``torch.save`` wrote a part of a tensor, or another object, into a file of several."""

    file: str
    start: int
    size_bytes: int
    offsets: tuple[int, ...] = ()  # in the tensor
    shape: tuple[int, ...] = ()  # of the part


class _Slice(io.RawIOBase):
    """A part of an open file, presented as its own file."""

    def __init__(self, file: BinaryIO, place: _Place) -> None:
        self._file = file
        self._place = place
        self._at = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.size_bytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._place.start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._place.size_bytes - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def describe_folder(folder: formats.Folder) -> Structure:
    """Describe the checkpoint in a folder, with the places of all numbers only if it will be loaded."""
    if _METADATA not in folder.names:
        fault = "is a checkpoint by torch.distributed.checkpoint without .metadata, which is written last"
        raise Fault(fault, "Probably the save was interrupted. Use an earlier checkpoint.")
    objects, paths = _read_metadata(folder.open(_METADATA))
    shards = _files_of([block for _, blocks in objects.values() for block in blocks], folder)
    tree: dict[str, Any] = {}
    for key, (info, blocks) in objects.items():
        value: Any = info
        if info is None:
            found = _described(shards, blocks[0])
            value = found.content
            if folder.to_load:  # it is loaded like a file of its own
                found.file.seek(0)
                value = replace(found, file=io.BytesIO(found.file.read()))
        elif folder.to_load:
            value = replace(info, parts=tuple(_part(shards, key, info.dtype, block) for block in blocks))
        _put(tree, paths.get(key, (key,)), value)
    content = _with_lists(tree)
    loaded = [_EXTRA] if _EXTRA in folder.names else []
    shards.update((name, folder.describe(name)) for name in loaded)

    def assemble(contents: Mapping[str, Any]) -> Any:
        return _with_extra(content, contents.get(_EXTRA, {}))

    return folder.assembled("torch.distributed.checkpoint", shards, loaded, assemble)


_Objects = dict[str, tuple[TensorInfo | None, list[_Place]]]


def _read_metadata(file: BinaryIO) -> tuple[_Objects, Mapping[str, Any]]:
    """Return every tensor (``None`` for another object) with its blocks, and the path of each in the content."""
    data = file.read()
    metadata = _state(InertUnpickler(io.BytesIO(data), len(data)).load(), "Metadata")
    place_of: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    for index, info in metadata["storage_data"].items():
        where = _state(info, "_StorageInfo")
        of = _state(index, "MetadataIndex")
        place_of[of["fqn"], of.get("offset")] = where["relative_path"], where["offset"], where["length"]
    objects: _Objects = {}
    for key, described in metadata["state_dict_metadata"].items():
        if isinstance(described, Opaque) and described.kind.endswith(".BytesStorageMetadata"):
            objects[key] = None, [_Place(*place_of[key, None])]
            continue
        of = _state(described, "TensorStorageMetadata")
        shape = of["size"]
        dtype = str(_state(of["properties"], "TensorProperties")[0]).removeprefix("torch.")
        chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in of["chunks"]]
        blocks = [_Place(*place_of[key, chunk["offsets"]], chunk["offsets"], chunk["sizes"]) for chunk in chunks]
        numbers = [shape, *(part for block in blocks for part in (block.offsets, block.shape))]
        if dtype not in BYTES_OF_DTYPE or not all(len(part) == len(shape) and is_shape(part) for part in numbers):
            raise damaged(DAMAGE)
        filled = [block for block in blocks if 0 not in block.shape]
        if not _make_up(shape, [tuple(zip(block.offsets, block.shape, strict=True)) for block in filled]):
            raise damaged(f"the parts of {printable(key)} do not make up its shape {printable(shape)}")
        objects[key] = TensorInfo(dtype, shape, None, laid_out=shape), filled or blocks[:1]
    paths = metadata.get("planner_data")
    return objects, paths if isinstance(paths, Mapping) else {}


def _make_up(shape: tuple[int, ...], blocks: list[tuple[tuple[int, int], ...]]) -> bool:
    """Return whether blocks, with offset and size by dimension, fill a shape without gaps or overlaps."""
    if 0 in shape or not shape:
        return len(blocks) == (0 not in shape)
    rows: dict[tuple[int, int], list[tuple[tuple[int, int], ...]]] = {}
    for (offset, size), *rest in blocks:
        rows.setdefault((offset, size), []).append(tuple(rest))
    end = 0
    for offset, size in sorted(rows):
        if offset != end:
            return False
        end += size
    return end == shape[0] and all(_make_up(shape[1:], below) for below in rows.values())


def _state(described: Any, kind: str) -> Any:
    if not isinstance(described, Opaque) or not described.kind.endswith(f".{kind}"):
        raise damaged(DAMAGE)
    return described.state


def _files_of(places: list[_Place], folder: formats.Folder) -> dict[str, Structure]:
    """Return the files, still without content; raise if one is too short, or if two objects overlap."""
    end = dict.fromkeys(folder.check_names(place.file for place in places), 0)
    for place in sorted(places, key=lambda place: (place.file, place.start)):
        if not are_sizes((place.start, place.size_bytes)) or place.start < end[place.file]:
            raise damaged(DAMAGE)
        end[place.file] = place.start + place.size_bytes
    files = {}
    for name, needed in end.items():
        file = folder.open(name)
        size_bytes = file.seek(0, os.SEEK_END)
        if size_bytes < needed:
            raise Fault(f"is cut short: {printable(name)} is shorter than its weights", RESTORE)
        files[name] = Structure(
            file, os.path.join(folder.path, name), size_bytes, "zip", None, set(), set(), records={}
        )
    return files


def _described(shards: Mapping[str, Structure], place: _Place) -> Structure:
    """Describe the object at a place, and add its records to those of its file."""
    whole = shards[place.file]
    part: Any = _Slice(whole.file, place)
    found = formats.describe(part, whole.path)
    records: dict[str, Record] = whole.records  # type: ignore[assignment]
    for name, record in found.records.items():
        records[f"{place.start}/{name}"] = record._replace(file=whole.file, start=place.start + record.start)
    return found


def _part(shards: Mapping[str, Structure], key: str, dtype: str, place: _Place) -> Part:
    found = _described(shards, place)
    tensor = found.content
    is_plain = isinstance(tensor, TensorInfo) and tensor.storage is not None and not tensor.kind
    if not is_plain or (tensor.dtype, tensor.shape) != (dtype, place.shape):
        raise damaged(f"{printable(place.file)} does not hold the part of {printable(key)} that .metadata describes")
    start = place.start + found.places[tensor.storage.key] + tensor.offset * BYTES_OF_DTYPE[dtype]
    return Part(place.file, start, place.offsets, place.shape, tensor.strides)


def _put(tree: dict[Any, Any], path: Any, value: Any) -> None:
    *way, last = path
    if len(path) > MAX_DEPTH or not all(type(name) in (str, int) for name in path):
        raise damaged(DAMAGE)
    for name in way:
        tree = tree.setdefault(name, {})
    if last in tree:
        raise damaged(DAMAGE)
    tree[last] = value


def _with_lists(tree: Any) -> Any:
    """Restore lists, whose items were saved under their indices."""
    if not isinstance(tree, dict):
        return tree
    branches = {name: _with_lists(branch) for name, branch in tree.items()}
    if tree and all(type(name) is int for name in tree):
        return [branches[name] for name in sorted(branches)]
    return branches


def _with_extra(content: Mapping[str, Any], extra: Any) -> dict[str, Any]:
    """Return the content merged with Lightning's ``meta.pt``, like in a file by Lightning."""
    if not isinstance(extra, Mapping) or content.keys() & extra.keys():
        raise damaged(f"its {_EXTRA} does not match the rest")
    whole = {**content, **extra}
    if LIGHTNING_VERSION not in extra:
        return whole
    if "state_dict" not in whole and "model" in whole:  # as FSDPStrategy calls it
        whole = {"state_dict": whole.pop("model"), **whole}
    optimizers: list[Any] = []
    while (name := f"optimizer_{len(optimizers)}") in whole:
        optimizers.append(whole.pop(name))
    if optimizers:
        whole["optimizer_states"] = optimizers
    return whole
