"""A checkpoint at a path: one file or a folder of shards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from lightning_gpu_tools.checkpoints.content import TensorInfo, all_state_dicts, likely
from lightning_gpu_tools.checkpoints.describing import describe
from lightning_gpu_tools.checkpoints.faults import Fault, any_error_is, damaged, faults_of
from lightning_gpu_tools.checkpoints.formats import deepspeed, shard_index, torch_distributed
from lightning_gpu_tools.checkpoints.opening import SUFFIXES, opened
from lightning_gpu_tools.checkpoints.pickle_structure import StructureReader
from lightning_gpu_tools.checkpoints.shards import Folder
from lightning_gpu_tools.checkpoints.structure import (
    Assembly,
    Progress,
    Structure,
    check_contents,
    collector_paused,
    compare_with_checksums,
    no_progress,
)
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError, CheckpointNotFoundError
from lightning_gpu_tools.units import printable_path

# Parts of checkpoints by Hugging Face, DeepSpeed and torch.distributed.checkpoint.
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\..*|.*(zero_pp|mp)_rank_.*|.*_(optim|model)_states\..*|.*\.distcp")
_MAX_HEAD_BYTES = 4 << 20  # describe 10,000 tensors
_MAX_NEIGHBORS = 8  # our default: an error message should not take long
Shapes = frozenset[tuple[str, tuple[int, ...] | None]]


def read_structure(path: str | os.PathLike[str]) -> Structure:
    """Describe a file, a folder of shards, or a file at a URL that fsspec knows.

    An error about a broken or missing one names, if it can, a checkpoint in its folder that can replace it.
    """
    with opened_source(path, to_load=False) as structure:
        return structure


def verify_checkpoint(path: str | os.PathLike[str], progress: Progress = no_progress) -> Structure:
    """Do the same, then compare all of each file with its checksums."""
    with opened_source(path) as structure:
        check_contents(structure.content, path)
        advance = progress(structure.size_bytes)
        for file in structure.files:
            compare_with_checksums(file, advance)
        return structure


@contextlib.contextmanager
def opened_source(path: str | os.PathLike[str], *, to_load: bool = True) -> Iterator[Structure]:
    """Give what :func:`read_structure` returns while its files are open.

    Places of blocks in the files are looked up only ``to_load`` them.
    """
    text = os.fspath(path)
    with _naming_another(text), contextlib.ExitStack() as stack:
        with faults_of(text), collector_paused():
            structure = _described_folder(text, stack, to_load)
        if structure is None:
            structure = describe(stack.enter_context(opened(path)), text)
            structure = replace(structure, part=_part(text, structure))
        yield structure


class FolderFormat(Protocol):
    """What a module of ``formats`` has for a format of several files."""

    def find(self, path: str, names: set[str]) -> str | None:
        """Return the folder with its files, by the names in a folder; ``None`` if it is of no such format."""

    def describe(self, folder: Folder, names: set[str], *, to_load: bool) -> Assembly:
        """Describe the files, with the places of all numbers if it costs no time or ``to_load`` them."""


_FORMATS: tuple[FolderFormat, ...] = (torch_distributed, deepspeed, shard_index)


def _described_folder(path: str, stack: contextlib.ExitStack, to_load: bool) -> Structure | None:
    """Open and describe a checkpoint of several files; ``None`` for anything else."""
    local = os.path.expanduser(path)
    folder, name = os.path.split(local)
    is_index = shard_index.INDEX.fullmatch(name)
    assembly = None
    if "://" in path:
        if is_index:
            raise Fault("lists shards that are at a URL", "Download the whole folder, and name the copy.")
    elif os.path.isdir(local):
        assembly = _assembly_in(local, stack, to_load)
    else:
        torch_distributed.check_name(folder, name)
        if is_index and os.path.isfile(local):
            assembly = shard_index.describe_index(Folder(folder, stack), name)
    if assembly is None:
        return None
    shards = assembly.shards
    with any_error_is(damaged("its files do not fit together")):
        content = assembly.assemble({name: shards[name].content for name in assembly.loaded})
    return Structure(
        None,
        path,
        sum(shard.size_bytes for shard in shards.values()),
        assembly.format,
        content,
        set().union(*(shards[name].globals for name in assembly.loaded)),
        set().union(*(shard.devices for shard in shards.values())),
        assembly=assembly,
    )


def _assembly_in(path: str, stack: contextlib.ExitStack, to_load: bool) -> Assembly | None:
    names = set(os.listdir(path))
    for form in _FORMATS:
        folder = form.find(path, names)
        if folder is not None:
            return form.describe(Folder(folder, stack), set(os.listdir(folder)), to_load=to_load)
    return None


def _part(path: str, structure: Structure) -> Fault | None:
    return shard_index.part(path, structure) or deepspeed.part(path, structure.content)


@contextlib.contextmanager
def _naming_another(path: str) -> Iterator[None]:
    try:
        yield
    except (BrokenCheckpointError, CheckpointNotFoundError) as error:
        place = Path(os.path.expanduser(path))
        if place.is_dir() or _SHARD.fullmatch(place.name):
            raise
        shapes = _shapes_at_beginning(place)
        other = _newest_complete_beside(place, shapes)
        if other is not None:
            what = "The newest complete checkpoint" + " of the same model" * (shapes is not None)
            error.args = (f"{error.args[0]} {what} in that folder: {printable_path(other)}",)
        raise


def _newest_complete_beside(path: Path, shapes: Shapes | None) -> Path | None:
    with contextlib.suppress(OSError):  # the error about the file itself must come out
        kinds = (path.suffix,) if path.exists() else SUFFIXES  # no .ckpt instead of a .json
        others = [entry for entry in path.parent.iterdir() if entry.suffix in kinds and entry.name != path.name]
        whole = [entry for entry in others if not _SHARD.fullmatch(entry.name)]
        newest_first = sorted(whole, key=lambda entry: entry.stat().st_mtime, reverse=True)
        for other in newest_first[:_MAX_NEIGHBORS]:
            with contextlib.suppress(CheckpointError, Fault), opened(other) as file:
                structure = describe(file, str(other))
                found = None if _part(str(other), structure) else _shapes_of(structure.content)
                if found is not None and shapes in (None, found):
                    return other
    return None


def _shapes_of(content: Any) -> Shapes | None:
    """Return names and shapes of the default weights; ``None`` if this is no model."""
    sets = likely(all_state_dicts(content))
    tensors = [(key, value) for weights in sets.values() for key, value in weights.items() if type(value) is TensorInfo]
    is_model = any("float" in value.dtype and not value.kind for _, value in tensors)  # and no generator's state
    return frozenset((key, value.shape) for key, value in tensors) if is_model else None


def _shapes_at_beginning(path: Path) -> Shapes | None:
    """Return what a damaged file still says of its weights."""
    try:
        with opened(path) as file:
            head = file.read(_MAX_HEAD_BYTES)
        if head[8:9] == b"{":
            header = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
            header.pop("__metadata__", None)
            return frozenset((key, tuple(entry["shape"])) for key, entry in header.items())
        name_bytes, extra_bytes = struct.unpack_from("<2H", head, 26)  # APPNOTE.TXT 4.3.7
        start = 30 + name_bytes + extra_bytes
        if not head[30 : 30 + name_bytes].endswith(b"/data.pkl"):
            return None
        with collector_paused():
            return _shapes_of(StructureReader(BytesIO(head[start:]), len(head)).load())
    except Exception:  # noqa: BLE001 - damaged bytes raise anything
        return None
