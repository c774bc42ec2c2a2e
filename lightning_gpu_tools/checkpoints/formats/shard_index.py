"""Shards with an index, by Hugging Face's tools, and one of them alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.faults import RESTORE, Fault, any_error_is, damaged
from lightning_gpu_tools.checkpoints.formats.safetensors import without_repeats
from lightning_gpu_tools.checkpoints.key_tree import list_groups, listed
from lightning_gpu_tools.checkpoints.opening import opened
from lightning_gpu_tools.checkpoints.shards import Folder
from lightning_gpu_tools.checkpoints.structure import Assembly, Structure
from lightning_gpu_tools.errors import CheckpointError
from lightning_gpu_tools.units import printable, printable_path

# Names by Hugging Face's tools: model.safetensors.index.json or .index.fp16.json, and model-00001-of-00002.safetensors.
INDEX = re.compile(r".+\.index(\.\w+)?\.json")
_SHARD = re.compile(r".+-(\d{5})-of-(\d{5})\.\w+")
# torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)
_PART_BY_DCP = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
_MAX_INDEX_BYTES = 128 << 20  # a million weights


def _is_one_of_several(name: str) -> bool:
    """Whether this is the name of one of several shards."""
    numbers = _SHARD.fullmatch(name)
    return numbers is not None and int(numbers[2]) > 1


def find(path: str, names: set[str]) -> str | None:
    """Return the folder if it has an index, or shards without one."""
    has_any = any(INDEX.fullmatch(name) or _PART_BY_DCP.fullmatch(name) or _is_one_of_several(name) for name in names)
    return path if has_any else None


def describe(folder: Folder, names: set[str], *, to_load: bool) -> Assembly:
    """Describe the shards that the index in a folder lists."""
    indexes = sorted(filter(INDEX.fullmatch, names))
    if len(indexes) > 1:
        raise Fault("is a folder", f"It holds {len(indexes)} checkpoints; name one: {listed(indexes)}")
    if indexes:
        return describe_index(folder, indexes[0])
    if any(map(_PART_BY_DCP.fullmatch, names)):
        raise _parts_by_dcp("holds the parts of all ranks", folder.path)
    raise Fault("holds shards of a checkpoint without the index that lists them", "Get all its files.")


def describe_index(folder: Folder, name: str) -> Assembly:
    """Describe the shards that an index lists."""
    file_of = _read_index(folder.open(name))
    names = folder.check_names(file_of.values())
    numbered = [match for match in map(_SHARD.fullmatch, names) if match]
    if len(numbered) == len(names) and {int(match[1]) for match in numbered} != set(range(1, int(numbered[0][2]) + 1)):
        raise Fault(f"lists only {len(numbered)} of {int(numbered[0][2])} shards", RESTORE)
    shards = {shard: folder.describe(shard) for shard in names}
    return Assembly(
        next(iter(shards.values())).format, shards, tuple(names), lambda contents: _merged(file_of, contents)
    )


def part(path: str, structure: Structure) -> Fault | None:
    """Return the fault of one of several shards; ``None`` for any other file."""
    name, folder = os.path.basename(path), Path(os.path.expanduser(path)).parent
    numbers = _SHARD.fullmatch(name) if _is_one_of_several(name) else None
    what = f"shard {int(numbers[1])} of {int(numbers[2])} of a checkpoint" if numbers else ""
    for index, names in _indexes_in(folder):
        if name in names:
            if len(names) > 1:
                what = what or f"one of the {len(names)} shards of a checkpoint"
            return Fault(f"is {what}", f"Name its index instead: {printable_path(index)}") if what else None
    if "DCP_SHARDING_INFO" in structure.metadata:
        return _parts_by_dcp("is one rank's part", str(folder))
    if what:
        return Fault(f"is {what} by its name, and the index of that checkpoint is not beside it", "Get all its files.")
    return None


def _parts_by_dcp(what: str, folder: str) -> Fault:
    """Return the fault of parts that do not tell whether one is missing."""
    return Fault(
        f"{what} of a checkpoint that torch.distributed.checkpoint wrote as safetensors",
        "Load all parts into the state_dict of a model: torch.distributed.checkpoint.load(state_dict, "
        f"storage_reader=torch.distributed.checkpoint.HuggingFaceStorageReader({printable_path(folder)!r}))",
    )


def _read_index(file: BinaryIO) -> dict[str, str]:
    """Return the file that each weight is in."""
    with any_error_is(damaged("it is no index of shards")):  # which a longer text, cut here, is not either
        weight_map = json.loads(file.read(_MAX_INDEX_BYTES), object_pairs_hook=without_repeats)["weight_map"]
        if weight_map and all(isinstance(name, str) for name in weight_map.values()):
            return dict(weight_map)
        raise ValueError("no names of files")


def _merged(file_of: Mapping[str, str], contents: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the weights of all shards in the order of the index, if it agrees with them."""
    for name, content in contents.items():
        held = content.keys() if isinstance(content, Mapping) else set()
        wanted = {key for key, file in file_of.items() if file == name}
        for keys, what in ((wanted - held, "does not hold"), (held - wanted, "also holds")):
            if keys:
                others = sorted({file_of[key] for key in keys & file_of.keys()} - {name})
                where = f", which {listed(others, 3)} holds, too" if others else ""
                shown = list_groups(sorted(map(str, keys)))
                raise Fault(f"disagrees with its shards: {printable(name)} {what} {shown}{where}", RESTORE)
    whole = OrderedDict((key, contents[file][key]) for key, file in file_of.items())
    versions = [getattr(content, "_metadata", None) for content in contents.values()]
    if all(isinstance(version, Mapping) for version in versions):
        whole._metadata = OrderedDict(item for version in versions for item in version.items())  # type: ignore[attr-defined, union-attr]
    return whole


def _indexes_in(folder: Path) -> Iterator[tuple[str, set[str]]]:
    """Yield each index in a folder, and the names of its shards."""
    with contextlib.suppress(OSError):  # it cannot be listed, or is a URL
        for entry in sorted(entry for entry in folder.iterdir() if INDEX.fullmatch(entry.name)):
            with contextlib.suppress(Fault, CheckpointError), opened(entry) as file:
                yield str(entry), set(_read_index(file).values())
