"""A checkpoint at a path, one file or a folder of shards, opened once for all that is to be done with it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import BinaryIO

from lightning_gpu_tools.checkpoints.deepspeed_folder import describe_deepspeed, find_deepspeed, part_of_deepspeed
from lightning_gpu_tools.checkpoints.distributed_folder import describe_distributed, is_distributed, is_piece
from lightning_gpu_tools.checkpoints.envelope import check_contents
from lightning_gpu_tools.checkpoints.formats import Fault, Format, broken, opened
from lightning_gpu_tools.checkpoints.neighbors import naming_another
from lightning_gpu_tools.checkpoints.shards import (
    PART_BY_DCP,
    Folder,
    describe_index,
    describing,
    is_index,
    part_of_a_whole,
    parts_by_dcp,
)
from lightning_gpu_tools.checkpoints.structure import Structure, collector_paused, compare_with_checksums, describe
from lightning_gpu_tools.units import printable, printable_path

Files = Mapping[str, BinaryIO]


def read_structure(path: str | os.PathLike[str]) -> Structure:
    """Read the description of a checkpoint's contents and check it against what is there.

    Args:
        path: A local path, of a folder as well if it holds shards, or any URL of a file that fsspec knows.

    Raises:
        CheckpointNotFoundError: There is nothing at ``path``.
        BrokenCheckpointError: It is damaged, not complete or no checkpoint.
        OSError: It cannot be read.
    """
    with opened_source(path, to_load=False) as (structure, _):
        return structure


def verify_checkpoint(path: str | os.PathLike[str], progress: Callable[[int], None] = lambda _: None) -> Structure:
    """Do the same, then read the whole of each file and compare it with the checksums in it.

    Args:
        path: As for :func:`read_structure`.
        progress: Called with the number of bytes that were read since the last call.

    Raises:
        CheckpointNotFoundError, BrokenCheckpointError, OSError: As :func:`read_structure`.
    """
    with opened_source(path) as (structure, files):
        check_contents(structure.content, path)
        for name, file in files.items():
            compare_with_checksums(file, structure.shard(name), progress)
        return structure


@contextlib.contextmanager
def opened_source(path: str | os.PathLike[str], *, to_load: bool = True) -> Iterator[tuple[Structure, Files]]:
    """Open a file or the files of a folder, and give what they hold and themselves, by the names of the shards.

    Args:
        path: As for :func:`read_structure`.
        to_load: Whether to look up where all numbers are, and not only what is said of them.

    Raises:
        CheckpointNotFoundError, BrokenCheckpointError, OSError: As :func:`read_structure`.
    """
    text = os.fspath(path)
    with naming_another(text), contextlib.ExitStack() as stack:
        try:
            with collector_paused():
                structure, files = _described_folder(text, stack, to_load) or (None, {})
        except Fault as fault:
            raise broken(text, fault) from None
        if structure is None:
            files = {"": stack.enter_context(opened(path))}
            structure = describe(files[""], text)
            part = part_of_a_whole(text, structure) or part_of_deepspeed(text, structure.content)
            structure = replace(structure, part=part)
        yield structure, files


def _described_folder(path: str, stack: contextlib.ExitStack, to_load: bool) -> tuple[Structure, Files] | None:
    """Open and describe what has shards; ``None`` for a single file and for any other folder.

    Raises:
        Fault: It cannot be put together, or is one of the shards.
    """
    if "://" in path:
        if is_index(os.path.basename(path)):
            raise Fault("lists shards that are at a URL", "Download the whole folder, and name the copy.")
        return None
    local = os.path.expanduser(path)
    if not os.path.isdir(local):
        folder, name = os.path.split(local)
        if is_piece(name):
            rank = re.match(r"__(\d+)", name)
            what = f"is rank {rank[1]}'s part" if rank else "is the list of parts"
            advice = f"Name the folder instead: {printable_path(folder or '.')}"
            raise Fault(f"{what} of a checkpoint by torch.distributed.checkpoint", advice)
        if not is_index(name) or not os.path.isfile(local):
            return None
        opened_folder = Folder(folder, stack)
        assembly = describe_index(opened_folder, name)
        format_: Format = next(iter(assembly.shards.values())).format
    elif is_distributed(names := set(os.listdir(local))):
        opened_folder, format_ = Folder(local, stack), "dcp"
        assembly = describe_distributed(opened_folder, names, to_load=to_load)
    elif inner := find_deepspeed(local, names):
        opened_folder, format_ = Folder(inner, stack), "deepspeed"
        assembly = describe_deepspeed(opened_folder, set(os.listdir(inner)))
    elif indexes := sorted(filter(is_index, names)):
        if len(indexes) > 1:
            raise Fault(
                "is a folder", f"It holds {len(indexes)} checkpoints; name one: {', '.join(map(printable, indexes))}"
            )
        return _described_folder(os.path.join(path, indexes[0]), stack, to_load)
    elif any(map(PART_BY_DCP.fullmatch, names)):
        raise parts_by_dcp("holds the parts of all ranks", local)
    else:
        return None
    shards = assembly.shards
    with describing("its files do not fit together"):
        content = assembly.assemble({name: shards[name].content for name in assembly.loaded})
    structure = Structure(
        path,
        sum(shard.size_bytes for shard in shards.values()),
        format_,
        content,
        frozenset().union(*(shards[name].globals for name in assembly.loaded)),
        frozenset().union(*(shard.devices for shard in shards.values())),
        assembly=assembly,
    )
    return structure, opened_folder.files
