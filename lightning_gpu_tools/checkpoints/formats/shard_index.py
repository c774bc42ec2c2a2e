"""Shards with an index, as written by Hugging Face's tools, and single shards."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from lightning_gpu_tools.checkpoints.formats import Folder
from lightning_gpu_tools.checkpoints.formats.safetensors import without_repeats
from lightning_gpu_tools.checkpoints.key_tree import list_groups, listed
from lightning_gpu_tools.checkpoints.structure import RESTORE, Assembly, Fault, any_error_is, damaged
from lightning_gpu_tools.units import printable

# Names by Hugging Face's tools: model.safetensors.index.json or .index.fp16.json, and model-00001-of-00002.safetensors.
INDEX = re.compile(r".+\.index(\.\w+)?\.json")
_SHARD = re.compile(r".+-(\d{5})-of-(\d{5})\.\w+")
PART = re.compile(r".+-\d{5}-of-(?!00001\.)\d{5}\.\w+")
FILES = re.compile(rf"{INDEX.pattern}|{PART.pattern}")
_MAX_INDEX_BYTES = 128 << 20  # a million weights


def describe(folder: Folder, names: set[str], *, to_load: bool) -> Assembly:
    """Describe the shards that the index in a folder lists."""
    indexes = sorted(filter(INDEX.fullmatch, names))
    if len(indexes) > 1:
        raise Fault("is a folder", f"It holds {len(indexes)} checkpoints. Use one of them: {listed(indexes)}")
    if not indexes:
        raise Fault("holds shards of a checkpoint without their index", "Copy or download all files.")
    with any_error_is(damaged("it is not an index of shards")):  # nor is longer text, which is cut off here
        text = folder.open(indexes[0]).read(_MAX_INDEX_BYTES)
        file_of: dict[str, str] = dict(json.loads(text, object_pairs_hook=without_repeats)["weight_map"])
        if not file_of or not all(isinstance(name, str) for name in file_of.values()):
            raise ValueError("no names of files")
    files = folder.check_names(file_of.values())
    numbered = [match for match in map(_SHARD.fullmatch, files) if match]
    if len(numbered) == len(files) and {int(match[1]) for match in numbered} != set(range(1, int(numbered[0][2]) + 1)):
        raise Fault(f"lists only {len(numbered)} of {int(numbered[0][2])} shards", RESTORE)
    shards = {shard: folder.describe(shard) for shard in files}
    return Assembly(
        next(iter(shards.values())).format, shards, tuple(files), lambda contents: _merged(file_of, contents)
    )


def _merged(file_of: Mapping[str, str], contents: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the weights of all shards in the order of the index, if it agrees with them."""
    for name, content in contents.items():
        held = content.keys() if isinstance(content, Mapping) else set()
        wanted = {key for key, file in file_of.items() if file == name}
        for keys, verb in ((wanted - held, "does not hold"), (held - wanted, "also holds")):
            if keys:
                shown = list_groups(sorted(map(str, keys)))
                raise Fault(f"does not match its shards: {printable(name)} {verb} {shown}", RESTORE)
    whole = OrderedDict((key, contents[file][key]) for key, file in file_of.items())
    versions = [getattr(content, "_metadata", None) for content in contents.values()]
    if all(isinstance(version, Mapping) for version in versions):
        whole._metadata = OrderedDict(item for version in versions for item in version.items())  # type: ignore[attr-defined, union-attr]
    return whole
