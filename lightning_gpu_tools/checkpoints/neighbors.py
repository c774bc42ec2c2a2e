"""Which other checkpoint in the folder of a broken or missing one can be loaded in its place."""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from lightning_gpu_tools.checkpoints.content import all_state_dicts, likely
from lightning_gpu_tools.checkpoints.deepspeed_folder import part_of_deepspeed
from lightning_gpu_tools.checkpoints.descriptions import TensorInfo
from lightning_gpu_tools.checkpoints.formats import SUFFIXES, Fault, opened
from lightning_gpu_tools.checkpoints.pickle_structure import StructureReader
from lightning_gpu_tools.checkpoints.shards import part_of_a_whole
from lightning_gpu_tools.checkpoints.structure import collector_paused, describe
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError, CheckpointNotFoundError
from lightning_gpu_tools.units import printable_path

# Each is a part of a checkpoint, by the names that DeepSpeed, Hugging Face and torch.distributed.checkpoint give.
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\..*|.*(zero_pp|mp)_rank_.*|.*_(optim|model)_states\..*|.*\.distcp")
# As much as describes 10,000 tensors.
_MAX_HEAD_BYTES = 4 << 20
_MAX_NEIGHBORS = 8  # our default: whoever waits for an error message wants it soon
Shapes = frozenset[tuple[str, tuple[int, ...] | None]]


@contextlib.contextmanager
def naming_another(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add to the error about a broken or missing file which other one in its folder can be loaded instead."""
    try:
        yield
    except (BrokenCheckpointError, CheckpointNotFoundError) as error:
        place = Path(os.path.expanduser(path))
        if place.is_dir() or _SHARD.fullmatch(place.name):
            raise
        shapes = _shapes_at_beginning(place)
        other = _newest_complete_beside(place, shapes)
        if other is not None:
            of_model = " of the same model" * (shapes is not None)
            error.args = (
                f"{error.args[0]} The newest complete checkpoint{of_model} in that folder: {printable_path(other)}",
            )
        raise


def _newest_complete_beside(path: Path, shapes: Shapes | None) -> Path | None:
    """Return the newest other whole checkpoint in a folder, of these names and shapes if they are known."""
    try:
        kinds = (path.suffix,) if path.exists() else SUFFIXES  # beside a broken .json nobody looks for a .ckpt
        others = [entry for entry in path.parent.iterdir() if entry.suffix in kinds and entry.name != path.name]
        newest_first = sorted(others, key=lambda entry: entry.stat().st_mtime, reverse=True)
        whole = [entry for entry in newest_first if not _SHARD.fullmatch(entry.name)]
        for other in whole[:_MAX_NEIGHBORS]:
            with contextlib.suppress(CheckpointError, Fault), opened(other) as file:
                structure = describe(file, str(other))
                is_part = part_of_a_whole(str(other), structure) or part_of_deepspeed(str(other), structure.content)
                found = None if is_part else _shapes_of(structure.content)
                if found is not None and shapes in (None, found):
                    return other
    except OSError:  # listing neighbors is a courtesy; the error about the file itself must come out
        pass
    return None


def _shapes_of(content: Any) -> Shapes | None:
    """Return names and shapes of the weights that are meant if nobody names any; ``None`` if there are none."""
    sets = likely(all_state_dicts(content))
    tensors = [(key, value) for weights in sets.values() for key, value in weights.items() if type(value) is TensorInfo]
    is_model = any("float" in value.dtype and not value.kind for _, value in tensors)  # a generator's state is none
    return frozenset((key, value.shape) for key, value in tensors) if is_model else None


def _shapes_at_beginning(path: Path) -> Shapes | None:
    """Return what can still be read of the weights in a damaged zip file: torch writes their description first."""
    try:
        with opened(path) as file:
            head = file.read(_MAX_HEAD_BYTES)
        name_bytes, extra_bytes = struct.unpack_from("<2H", head, 26)  # APPNOTE.TXT 4.3.7
        start = 30 + name_bytes + extra_bytes
        if not head[30 : 30 + name_bytes].endswith(b"/data.pkl"):
            return None
        with collector_paused():
            return _shapes_of(StructureReader(BytesIO(head[start:]), len(head)).load())
    except Exception:  # noqa: BLE001 - damaged bytes raise anything, and then nothing is known
        return None
