"""Functions that read checkpoints of any format safely and to the CPU, with errors that explain the problem."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from lightning_gpu_tools.checkpoints.content import (
    all_state_dicts,
    check_contents,
    check_training_state,
    describe_content,
    put_weights,
)
from lightning_gpu_tools.checkpoints.formats import describe
from lightning_gpu_tools.checkpoints.inert_pickle import Opaque, beyond_plain_data
from lightning_gpu_tools.checkpoints.key_renaming import quoted
from lightning_gpu_tools.checkpoints.key_tree import list_groups
from lightning_gpu_tools.checkpoints.sources import checkpoint_at, opened_source
from lightning_gpu_tools.checkpoints.state_dicts import check_numbers, weights_in, whole_weights
from lightning_gpu_tools.checkpoints.structure import Place, Structure, TensorInfo, compare_with_checksums, faults_of
from lightning_gpu_tools.checkpoints.torch_loading import (
    described_weights,
    holds_tensors,
    is_plain,
    load_file,
    refusal,
    with_numbers,
)
from lightning_gpu_tools.errors import BrokenCheckpointError, UnsafeCheckpointError
from lightning_gpu_tools.units import printable_path


def read_checkpoint(
    path: str | os.PathLike[str],
    *,
    map_location: Any = "cpu",
    weights_only: bool = True,
    verify: bool = False,
    opened: Structure | None = None,
) -> Any:
    """Return the contents of a checkpoint file or a folder of shards.

    Tensors are mapped: they take no memory until they are used, and change with the file. A tensor in several parts is
    joined for each operation, and takes memory only during it.

    With ``weights_only``, raises ``UnsafeCheckpointError`` for anything but plain data. With ``verify``, compares
    checksums first. Other errors are as in ``read_structure``. ``opened`` is the checkpoint, if it is already open.
    """

    def load(structure: Structure) -> Any:
        try:
            return load_file(structure, map_location, weights_only)
        except UnsafeCheckpointError as error:
            entries = check_contents(structure.content, structure.path)
            values = [value for weights in entries.values() for value in weights.values()]
            is_shard = structure.path != checkpoint_at(path)  # the weights are elsewhere
            if is_shard or (values and all(is_plain(value) or not holds_tensors(value) for value in values)):
                shown = printable_path(path)
                error.args = (
                    f"{error}\n  To load only the weights, without opening the rest, use "
                    f"lightning_gpu_tools.load_weights(model, {shown!r}), "
                    f"or: lightning-gpu-tools checkpoint convert {shlex.quote(shown)} weights.pt --weights",
                )
            raise

    return _read(path, load, verify, map_location, opened)


Unopened = Mapping[str, Mapping[str, str]]  # entry -> key -> class, for objects among the weights


def read_weights(
    path: str | os.PathLike[str], *, weights_only: bool = True, opened: Structure | None = None
) -> tuple[Any, tuple[str, ...], Unopened]:
    """Return the weights of a file or folder, with the rest only described, its classes, and what was not opened.

    Raises ``UnsafeCheckpointError`` for a weight that is not a block of plain numbers. If not ``weights_only``, opens
    everything, which may run code.
    """
    classes: set[str] = set()
    unopened: defaultdict[str, dict[str, str]] = defaultdict(dict)

    def load(structure: Structure) -> Any:
        entries = check_contents(structure.content, structure.path)
        if not weights_only:
            return load_file(structure, "cpu", weights_only)
        content, left_out = described_weights(structure, entries)
        refused = refusal(structure)
        if left_out and refused is None:
            try:
                return load_file(structure, "cpu", weights_only)
            except UnsafeCheckpointError as error:
                refused = error
        weights = {
            key: kind
            for entry, kinds in left_out.items()
            for key, kind in kinds.items()
            if holds_tensors(entries[entry][key]) and not key.endswith("_extra_state")
        }
        if weights:
            shown = ", ".join(sorted({*weights.values()}))
            raise UnsafeCheckpointError(
                f"{refused}\n  Some of its weights are not plain tensors, so they cannot be loaded without opening it "
                f"({shown}): {list_groups(weights)}."
            )
        classes.update(beyond_plain_data(structure.globals))
        for entry, kinds in left_out.items():
            unopened[entry].update(kinds)
        return content

    content = _read(path, load, opened=opened)
    for entry, weights in all_state_dicts(content).items() if classes else ():
        objects = {key: value.kind for key, value in weights.items() if isinstance(value, (Opaque, TensorInfo))}
        if objects:  # in a folder by torch.distributed.checkpoint, which stores each object like a file
            unopened[entry].update(objects)
            rest = OrderedDict((key, value) for key, value in weights.items() if key not in objects)
            content = put_weights(content, {entry: rest})
    return content, tuple(sorted(classes)), unopened


def verify_checkpoint(path: str | os.PathLike[str]) -> tuple[Structure, tuple[str, ...]]:
    """Compare each whole file with its checksums, then load everything, or only the weights next to foreign classes.

    Returns the description, and the classes of what was not read. A checkpoint without an error here can be loaded.
    """
    with opened_source(path) as structure:
        compare_with_checksums(structure)
        classes: tuple[str, ...] = ()
        unopened: Unopened = {}
        try:
            content = read_checkpoint(path, opened=structure)
        except UnsafeCheckpointError:
            content, classes, unopened = read_weights(path, opened=structure)
        _check_weights(content, unopened, path)
        check_training_state(content, path)
        return structure, classes


def _check_weights(content: Any, unopened: Unopened, path: str | os.PathLike[str]) -> None:
    """Raise unless every set of weights can be loaded into a model."""
    shown = printable_path(path)
    for entry, weights in weights_in(content, path).items():
        check_numbers(str(path), whole_weights(str(path), weights))
        may_be_more = not hasattr(weights, "_metadata")  # such as the name of an architecture, beside the weights
        for key, value in weights.items():
            # Some modules keep numbers, or lists of tensors.
            is_list = isinstance(value, (list, tuple)) and bool(value)
            kinds = (int, float, str, bytes, Mapping, list, tuple) if is_list else (str, bytes, Mapping)
            is_no_weight = all(isinstance(item, kinds) for item in (value if is_list else [value]))
            if is_no_weight and not (key.endswith("_extra_state") or (may_be_more and "." not in key)):
                what = describe_content(value)
                raise BrokenCheckpointError(f"{shown}: the weight {quoted(key)} is {what}. Save a module's state_dict.")
        objects = [key for key in unopened.get(entry, ()) if not key.endswith("_extra_state")]
        if objects:
            raise UnsafeCheckpointError(
                f"{shown} has weights that were not opened, because this would run code: {list_groups(objects)}. "
                "Ask its author for the model's state_dict()."
            )


def _read(
    path: str | os.PathLike[str],
    load: Callable[[Structure], Any],
    verify: bool = False,
    map_location: Any = "cpu",
    opened: Structure | None = None,
) -> Any:
    with contextlib.nullcontext(opened) if opened else opened_source(path) as structure, faults_of(path):
        if verify:
            compare_with_checksums(structure)
        if structure.assemble is None:
            return load(structure)
        shards = structure.shards

        def load_object(leaf: Any) -> Any:
            """Load an object of a folder by torch.distributed.checkpoint, which stores each like a file."""
            if not isinstance(leaf, Place):
                return leaf
            shard = shards[leaf.file]
            shard.file.seek(leaf.start)
            return load(describe(io.BytesIO(shard.file.read(leaf.size_bytes)), shard.path))

        content = structure.assemble({name: load(shards[name]) for name in structure.loaded})
        return with_numbers(content, shards, map_location, load_object)
