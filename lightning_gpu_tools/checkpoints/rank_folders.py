"""Folders that all ranks have written, by torch.distributed.checkpoint or DeepSpeed; read without running them."""

from __future__ import annotations

import io
import math
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.content import (
    BYTES_OF_DTYPE,
    LIGHTNING_VERSION,
    MAX_DEPTH,
    Opaque,
    TensorInfo,
    are_sizes,
)
from lightning_gpu_tools.checkpoints.formats import RESTORE, Fault, Record, any_error_is, damaged
from lightning_gpu_tools.checkpoints.pickle_structure import StructureReader
from lightning_gpu_tools.checkpoints.shards import Folder, Part, SplitTensorInfo, check_cover, is_plain_name
from lightning_gpu_tools.checkpoints.structure import Assembly, Structure, describe, is_byte_swapped
from lightning_gpu_tools.units import printable, printable_path

# DeepSpeedEngine._get_ckpt_name and _get_rank_zero_ckpt_name, if only ZeRO splits the model.
_WHOLE_MODEL = "mp_rank_00_model_states.pt"
_MODEL_OF_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
_OPTIMIZER_OF_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_ANY = re.compile(r".*(model|optim)_states\.pt")
# DeepSpeedEngine._common_checkpoint_state; all else is Lightning's.
_OWN_ENTRIES = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "ds_version"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "ds_config", "sparse_tensor_module_names"),
    }
)
_OPTIMIZER, _RANKS = "optimizer_state_dict", "partition_count"
_GROUPS, _GROUPS_OF_STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_DAMAGE = "its files do not describe a ZeRO checkpoint"

Shards = Sequence[Structure]  # by rank
Shapes = Mapping[str, tuple[int, ...]]
Piece = tuple[str, int, int]  # file, offset in bytes, how many numbers


def find_deepspeed(path: str, names: set[str]) -> str | None:
    """Return the folder with DeepSpeed's files: this one, or the one that its ``latest`` names."""
    if any(map(_ANY.fullmatch, names)):
        return path
    latest = os.path.join(path, "latest")
    if not os.path.isfile(latest):
        return None
    with open(latest, encoding="utf-8", errors="replace") as file:
        tag = file.read(1000).strip()
    folder = os.path.join(path, tag)
    is_there = is_plain_name(tag) and os.path.isdir(folder) and any(map(_ANY.fullmatch, os.listdir(folder)))
    return folder if is_there else None


def describe_deepspeed(folder: Folder, names: set[str]) -> Assembly:
    """Describe the checkpoint in a folder."""
    model_names, optimizer_names = (_by_rank(pattern, names) for pattern in (_MODEL_OF_RANK, _OPTIMIZER_OF_RANK))
    others = {name for name in names if _ANY.fullmatch(name)} - {_WHOLE_MODEL, *model_names, *optimizer_names}
    if others:
        raise Fault(
            f"is a DeepSpeed checkpoint of a model that more than ZeRO has split ({printable(min(others))})",
            "Only the program that trained it can join experts, pipeline stages and tensor-parallel parts.",
        )
    is_whole = _WHOLE_MODEL in names
    if is_whole == bool(model_names):
        raise damaged("its model_states.pt are of two checkpoints" if is_whole else "it has no model_states.pt")
    models = [folder.describe(name) for name in model_names or [_WHOLE_MODEL]]
    optimizers = [folder.describe(name) for name in optimizer_names]
    for shard in (*models, *optimizers):
        _check_byte_order(shard)
    loaded = models[0].name
    with any_error_is(damaged(_DAMAGE)):
        model: Mapping[str, Any] = models[0].content
        split: dict[str, SplitTensorInfo] = {}
        if model["param_shapes"] is not None:  # or nothing is split: stage 0
            _check_ranks(optimizers)
            if is_whole:
                split = dict(_join_stages_1_and_2(model["param_shapes"], optimizers))
            else:
                _check_ranks(models)
                split = dict([*_join_stage_3(model["param_shapes"], optimizers), *_join_frozen(models)])
            tied = model["shared_params"].items()
            split.update((name, split[stored]) for name, stored in tied if stored in split)
        buffers = set(model["buffer_names"])

    def assemble(contents: Mapping[str, Any]) -> Any:
        content = contents[loaded]
        weights: OrderedDict[str, Any] = OrderedDict(content["module"])
        if not split.keys() <= weights.keys():
            raise damaged(_DAMAGE)
        for name, value in weights.items():  # at stage 3 there is only an empty tensor for each parameter
            is_empty = not is_whole and tuple(getattr(value, "shape", None) or ()) == (0,)
            if is_empty and name not in split and name not in buffers:
                raise damaged(f"no file has the numbers of {printable(name)}")
        weights.update(split)
        if LIGHTNING_VERSION not in content:
            return weights
        return {**{name: entry for name, entry in content.items() if name not in _OWN_ENTRIES}, "state_dict": weights}

    return Assembly({shard.name: shard for shard in (*models, *optimizers)}, (loaded,), assemble)


def part_of_deepspeed(path: str, content: Any) -> Fault | None:
    """Return the fault of a file of DeepSpeed's without all weights; ``None`` for any other file."""
    if not isinstance(content, Mapping):
        return None
    optimizer, shapes, module = (content.get(entry) for entry in (_OPTIMIZER, "param_shapes", "module"))
    if isinstance(optimizer, Mapping) and _RANKS in optimizer:
        pattern, ranks = _OPTIMIZER_OF_RANK, _count(optimizer[_RANKS])
        what = "holds the optimizer of {} of a DeepSpeed checkpoint, not the weights by name"
    elif isinstance(shapes, list) and isinstance(module, Mapping):
        wanted = {key: shape for group in shapes if isinstance(group, Mapping) for key, shape in group.items()}
        tensors = [(key, value.shape) for key, value in module.items() if isinstance(value, TensorInfo)]
        if all(shape == wanted.get(key, shape) for key, shape in tensors):
            return None
        pattern, ranks = _MODEL_OF_RANK, content.get("dp_world_size")
        what = "is the file of {} of a DeepSpeed ZeRO-3 checkpoint, without the weights"
    else:
        return None
    rank = pattern.fullmatch(os.path.basename(path))
    whose = f"rank {int(rank[1])} of {printable(ranks)}" if rank else f"one of {printable(ranks)} ranks"
    folder = printable_path(os.path.dirname(path) or ".")
    return Fault(what.format(whose), f"Name the folder with the files of all ranks instead: {folder}")


def _by_rank(pattern: re.Pattern[str], names: set[str]) -> list[str]:
    found = {int(match[1]): name for name in names if (match := pattern.fullmatch(name))}
    return [found[rank] for rank in sorted(found)]


def _count(ranks: Any) -> Any:
    return max(ranks) if isinstance(ranks, list) and ranks and are_sizes(ranks) else ranks  # a list has it by group


def _check_ranks(shards: Shards) -> None:
    """Raise unless there is one file of each rank, all of the same checkpoint."""
    there = [int(re.findall(r"pp_rank_(\d+)", shard.name)[0]) for shard in shards]
    for shard in shards:
        content = shard.content
        ranks = _count(content[_OPTIMIZER][_RANKS]) if _OPTIMIZER in content else content["dp_world_size"]
        if ranks != len(there) or there != [*range(len(there))]:
            what = (
                f"is not complete: {printable(shard.name)} is of {printable(ranks)} ranks, but {len(there)} are there"
            )
            raise Fault(what, "Most likely a save or a copy was interrupted, or an older checkpoint was in the folder.")
    if not shards:
        raise Fault(
            "is not complete: *_optim_states.pt, the files of the optimizer with the fp32 weights, are missing",
            f"At stage 1 and 2, those that it was trained with are in its {_WHOLE_MODEL}.",
        )


def _join_stages_1_and_2(param_shapes: Sequence[Shapes], optimizers: Shards) -> Iterator[tuple[str, SplitTensorInfo]]:
    """Each group of parameters is one row of numbers, of which each rank has a part."""
    states = [shard.content[_OPTIMIZER] for shard in optimizers]
    if "zero_stage" not in states[0]:
        raise Fault(
            "is by an optimizer of DeepSpeed whose partitions its zero_to_fp32.py does not read either",
            f"The weights that it was trained with are in its {_WHOLE_MODEL}.",
        )
    paddings = states[0].get("param_alignment_paddings") or [[0] * len(shapes) for shapes in param_shapes]
    if {len(paddings), *(len(state[_GROUPS]) for state in states)} != {len(param_shapes)}:
        raise damaged(_DAMAGE)
    align = 2 * len(states)  # "Z2 started to align to 2*world_size to improve nccl performance"
    for number, shapes in enumerate(param_shapes):
        dtype = states[0][_GROUPS][number].dtype
        row: list[Piece] = []
        for shard, state in zip(optimizers, states, strict=True):
            row += _row(shard, [state[_GROUPS][number]], dtype)
        at = 0
        for (key, shape), padding in zip(shapes.items(), paddings[number], strict=True):
            yield key, _joined(dtype, shape, [row], at)
            at += math.prod(shape) + padding
        if -(-at // align) != -(-_length(row) // align):
            raise damaged(_DAMAGE)


def _join_stage_3(param_shapes: Sequence[Shapes], optimizers: Shards) -> Iterator[tuple[str, SplitTensorInfo]]:
    """Each rank has a row with its part of each parameter."""
    groups = [shard.content[_OPTIMIZER][_GROUPS_OF_STAGE_3] for shard in optimizers]
    dtype = groups[0][0].dtype
    rows = [_row(shard, group, dtype) for shard, group in zip(optimizers, groups, strict=True)]
    at = 0
    for key, shape in (item for shapes in param_shapes for item in shapes.items()):
        yield key, _joined(dtype, shape, rows, at)
        at += -(-math.prod(shape) // len(rows))
    if {*map(_length, rows)} != {at}:
        raise damaged(_DAMAGE)


def _join_frozen(models: Shards) -> Iterator[tuple[str, SplitTensorInfo]]:
    """What is not trained is cut likewise, but is not with the optimizer."""
    for key, shape in (models[0].content["frozen_param_shapes"] or {}).items():
        fragments = [shard.content["frozen_param_fragments"][key] for shard in models]
        dtype = fragments[0].dtype
        rows = [_row(shard, [info], dtype) for shard, info in zip(models, fragments, strict=True)]
        yield key, _joined(dtype, shape, rows, 0)


def _row(shard: Structure, tensors: Sequence[TensorInfo], dtype: str) -> list[Piece]:
    if shard.is_packed:
        raise Fault(f"has {printable(shard.name)} compressed", "Unpack it, and zip it without compression: zip -0.")
    row = []
    for info in tensors:
        if info.kind or len(info.shape or ()) != 1 or info.strides != (1,) or info.dtype != dtype:
            raise damaged(_DAMAGE)
        start = shard.places[info.storage.key] + info.offset * BYTES_OF_DTYPE[dtype]  # type: ignore[union-attr]
        row.append((shard.name, start, info.shape[0]))  # type: ignore[index]
    return row


def _length(row: Sequence[Piece]) -> int:
    return sum(numel for *_, numel in row)


def _joined(dtype: str, shape: tuple[int, ...], rows: Sequence[Sequence[Piece]], at: int) -> SplitTensorInfo:
    """Return a tensor of which each row has an equal share, from ``at`` on; the last share is padded."""
    left = math.prod(shape)
    share = -(-left // len(rows))
    parts: list[Part] = []
    end = 0
    for row in rows:
        skip, take = at, min(share, left)
        left -= take
        for name, start, numel in row:
            skipped = min(skip, numel)
            taken = min(take, numel - skipped)
            if taken:
                parts.append(Part(name, start + skipped * BYTES_OF_DTYPE[dtype], (end,), (taken,), (1,)))
            skip, take, end = skip - skipped, take - taken, end + taken
        if take:
            raise damaged(_DAMAGE)
    return SplitTensorInfo(dtype, shape, None, laid_out=(end,), parts=tuple(parts))


PIECE = re.compile(r"__\d+_\d+\.distcp|(__\d+)?\.metadata")  # by torch.distributed.checkpoint
_METADATA = ".metadata"
_EXTRA = "meta.pt"
_DCP_DAMAGE = "its .metadata does not describe a checkpoint"


@dataclass(frozen=True, slots=True)
class Place:
    """Where ``torch.save`` has written a tensor or another object."""

    file: str
    start: int
    size_bytes: int

    def read_from(self, file: BinaryIO) -> bytes:
        """Return the bytes."""
        file.seek(self.start)
        return file.read(self.size_bytes)


class _Slice(io.RawIOBase):
    """A part of an open file as a file of its own."""

    def __init__(self, file: BinaryIO, place: Place) -> None:
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


def describe_distributed(folder: Folder, names: set[str], *, to_load: bool) -> Assembly:
    """Describe the checkpoint in a folder, with the places of all numbers only ``to_load`` it."""
    if _METADATA not in names:
        what = "is a checkpoint by torch.distributed.checkpoint without its .metadata, which is written last"
        raise Fault(what, "Most likely the save was interrupted. Use an earlier checkpoint.")
    with any_error_is(damaged(_DCP_DAMAGE)):
        objects, paths = _read_metadata(folder.open(_METADATA))
        places = [place for _, found in objects.values() for _, _, place in found]
        shards = _files_of(places, folder)
        tree: dict[str, Any] = {}
        for key, (info, found) in objects.items():
            value: Any = info
            if info is None:
                described = _described(shards, found[0][2]).content
                value = found[0][2] if to_load else described
            elif to_load:
                value = replace(info, parts=tuple(_part(shards, key, info, *block) for block in found))
            _put(tree, paths.get(key, (key,)), value)
        content = _with_lists(tree)
    loaded = (_EXTRA,) if _EXTRA in names else ()
    shards.update((name, folder.describe(name)) for name in loaded)
    return Assembly(shards, loaded, lambda contents: _with_extra(content, contents.get(_EXTRA, {})))


Blocks = list[tuple[tuple[int, ...], tuple[int, ...], Place]]


def _read_metadata(file: BinaryIO) -> tuple[dict[str, tuple[SplitTensorInfo | None, Blocks]], Mapping[str, Any]]:
    """Return every tensor (or ``None``: another object) with its blocks, and the path of each in the content."""
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    metadata = _state(StructureReader(file, size_bytes).load(), "Metadata")
    place_of: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for index, info in metadata["storage_data"].items():
        where = _state(info, "_StorageInfo")
        if where.get("transform_descriptors"):
            raise Fault("is compressed by an extension", "Load it with torch.distributed.checkpoint and save it again.")
        of = _state(index, "MetadataIndex")
        place_of[of["fqn"], of.get("offset")] = Place(where["relative_path"], where["offset"], where["length"])
    objects: dict[str, tuple[SplitTensorInfo | None, Blocks]] = {}
    for key, described in metadata["state_dict_metadata"].items():
        if isinstance(described, Opaque) and described.kind.endswith(".BytesStorageMetadata"):
            objects[key] = None, [((), (), place_of[key, None])]
            continue
        of = _state(described, "TensorStorageMetadata")
        shape = of["size"]
        dtype = str(_state(of["properties"], "TensorProperties")[0]).removeprefix("torch.")
        chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in of["chunks"]]
        blocks = [(chunk["offsets"], chunk["sizes"], place_of[key, chunk["offsets"]]) for chunk in chunks]
        numbers = [shape, *(part for offsets, sizes, _ in blocks for part in (offsets, sizes))]
        if dtype not in BYTES_OF_DTYPE or not all(len(part) == len(shape) and are_sizes(part) for part in numbers):
            raise damaged(_DCP_DAMAGE)
        check_cover(key, shape, [block[:2] for block in blocks])
        filled = [block for block in blocks if 0 not in block[1]] or blocks[:1]
        objects[key] = SplitTensorInfo(dtype, shape, None, laid_out=shape), filled
    paths = metadata.get("planner_data")
    return objects, paths if isinstance(paths, Mapping) else {}


def _state(described: Any, kind: str) -> Any:
    if not isinstance(described, Opaque) or not described.kind.endswith(f".{kind}"):
        raise damaged(_DCP_DAMAGE)
    return described.state


def _files_of(places: list[Place], folder: Folder) -> dict[str, Structure]:
    """Return the files, so far without content; raise if one is too short, or two things are at one place."""
    end = dict.fromkeys(folder.check_names(place.file for place in places), 0)
    for place in sorted(places, key=lambda place: (place.file, place.start)):
        if not are_sizes((place.start, place.size_bytes)) or place.start < end[place.file]:
            raise damaged(_DCP_DAMAGE)
        end[place.file] = place.start + place.size_bytes
    files = {}
    for name, needed in end.items():
        file = folder.open(name)
        size_bytes = file.seek(0, os.SEEK_END)
        if size_bytes < needed:
            raise Fault(f"is cut short: {printable(name)} ends before the weights that are in it", RESTORE)
        files[name] = Structure(
            file, os.path.join(folder.path, name), size_bytes, "zip", None, set(), set(), records={}
        )
    return files


def _check_byte_order(structure: Structure) -> None:
    """Check that numbers can be taken from a file as they are."""
    if is_byte_swapped(structure):
        advice = "Load it with the tool that wrote it, and save it as safetensors."
        raise Fault("was written on a machine with another byte order", advice)


def _described(shards: Mapping[str, Structure], place: Place) -> Structure:
    """Describe what is at a place, and add its records to those of its file."""
    whole = shards[place.file]
    part: Any = _Slice(whole.file, place)
    found = describe(part, whole.path)
    _check_byte_order(found)
    records: dict[str, Record] = whole.records  # type: ignore[assignment]
    for name, record in found.records.items():
        records[f"{place.start}/{name}"] = record._replace(file=whole.file, start=place.start + record.start)
    return found


def _part(
    shards: Mapping[str, Structure],
    key: str,
    info: TensorInfo,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    place: Place,
) -> Part:
    found = _described(shards, place)
    block = found.content
    is_plain = isinstance(block, TensorInfo) and block.storage is not None and not block.kind and not found.is_packed
    if not is_plain or (block.dtype, block.shape) != (info.dtype, sizes):
        raise damaged(f"{printable(place.file)} does not hold the part of {printable(key)} that .metadata describes")
    start = place.start + found.places[block.storage.key] + block.offset * BYTES_OF_DTYPE[block.dtype]
    return Part(place.file, start, offsets, sizes, block.strides)


def _put(tree: dict[Any, Any], path: Any, value: Any) -> None:
    *way, last = path
    if len(path) > MAX_DEPTH or not all(type(name) in (str, int) for name in path):
        raise damaged(_DCP_DAMAGE)
    for name in way:
        tree = tree.setdefault(name, {})
    if last in tree:
        raise damaged(_DCP_DAMAGE)
    tree[last] = value


def _with_lists(tree: Any) -> Any:
    """Put back lists, which were saved by their numbers."""
    if not isinstance(tree, dict):
        return tree
    branches = {name: _with_lists(branch) for name, branch in tree.items()}
    if tree and all(type(name) is int for name in tree):
        return [branches[name] for name in sorted(branches)]
    return branches


def _with_extra(content: Mapping[str, Any], extra: Any) -> dict[str, Any]:
    """Return the content with Lightning's ``meta.pt`` as in a file by Lightning."""
    if not isinstance(extra, Mapping) or content.keys() & extra.keys():
        raise damaged(f"its {_EXTRA} does not fit the rest")
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
