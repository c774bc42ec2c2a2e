"""Functions that read checkpoints of any format safely and to the CPU, with errors that explain the problem."""

import contextlib
import os
import shlex
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_gpu_tools.checkpoints.content import (
    all_state_dicts,
    check_contents,
    check_training_state,
    describe_content,
    put_weights,
)
from lightning_gpu_tools.checkpoints.formats import opened_source
from lightning_gpu_tools.checkpoints.inert_pickle import Opaque, beyond_plain_data
from lightning_gpu_tools.checkpoints.key_tree import list_groups, quoted
from lightning_gpu_tools.checkpoints.state_dicts import weights_in, whole_weights
from lightning_gpu_tools.checkpoints.structure import Structure, TensorInfo, compare_with_checksums, faults_of
from lightning_gpu_tools.checkpoints.torch_loading import described_weights, load_file, loaded, refusal
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError, UnsafeCheckpointError
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
    with _opened(path, opened) as structure:
        if verify:
            compare_with_checksums(structure)
        try:
            return loaded(structure, lambda file: load_file(file, map_location, weights_only), map_location)
        except UnsafeCheckpointError as error:
            with contextlib.suppress(CheckpointError):
                weights_in(read_weights(path, opened=structure)[0], path)
                shown = printable_path(path)
                error.args = (
                    f"{error}\n  To load only the weights, without opening the rest, use "
                    f"lightning_gpu_tools.load_weights(model, {shown!r}), "
                    f"or: lightning-gpu-tools checkpoint convert {shlex.quote(shown)} weights.pt --weights",
                )
            raise


def read_weights(
    path: str | os.PathLike[str], *, weights_only: bool = True, opened: Structure | None = None
) -> tuple[Any, tuple[str, ...]]:
    """Return the weights of a file or folder, with the rest only described, and the classes in the rest.

    Raises ``UnsafeCheckpointError`` for a weight that is not a block of plain numbers. If not ``weights_only``, opens
    everything, which may run code.
    """
    classes: set[str] = set()

    def load(structure: Structure) -> Any:
        entries = check_contents(structure.content, structure.path)
        if not weights_only:
            return load_file(structure, "cpu", weights_only)
        content, odd = described_weights(structure, entries)
        refused = refusal(structure)
        if odd and refused is None:
            try:
                return load_file(structure, "cpu", weights_only)
            except UnsafeCheckpointError as error:
                refused = error
        weights = {key: kind for key, kind in odd.items() if kind}
        if weights:
            shown = ", ".join(sorted({*weights.values()}))
            raise UnsafeCheckpointError(
                f"{refused}\n  Some of its weights are not plain tensors, so they cannot be loaded without opening it "
                f"({shown}): {list_groups(weights)}."
            )
        classes.update(beyond_plain_data(structure.globals))
        return content

    with _opened(path, opened) as structure:
        content = loaded(structure, load, "cpu")
    for entry, weights in all_state_dicts(content).items() if classes else ():
        # In a folder by torch.distributed.checkpoint, each object is loaded like a file of its own.
        plain = {key: value for key, value in weights.items() if not isinstance(value, (Opaque, TensorInfo))}
        if len(plain) < len(weights):
            content = put_weights(content, {entry: OrderedDict(plain)})
    return content, tuple(sorted(classes))


def verify_checkpoint(path: str | os.PathLike[str]) -> tuple[Structure, tuple[str, ...]]:
    """Compare each whole file with its checksums, then load everything, or only the weights next to foreign classes.

    Returns the description, and the classes of what was not read. A checkpoint without an error here can be loaded.
    """
    with opened_source(path) as structure:
        compare_with_checksums(structure)
        classes: tuple[str, ...] = ()
        try:
            content = read_checkpoint(path, opened=structure)
        except UnsafeCheckpointError:
            content, classes = read_weights(path, opened=structure)
        for weights in weights_in(content, path).values():
            whole_weights(str(path), weights)
            for key, value in weights.items():
                # Without a dot, it may be the name of an architecture, beside the weights.
                if isinstance(value, (str, bytes, Mapping)) and "." in key and not key.endswith("_extra_state"):
                    raise BrokenCheckpointError(
                        f"{printable_path(path)}: the weight {quoted(key)} is {describe_content(value)}. Save a "
                        "module's state_dict."
                    )
        check_training_state(content, path)
        return structure, classes


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], opened: Structure | None) -> Iterator[Structure]:
    with contextlib.nullcontext(opened) if opened else opened_source(path) as structure, faults_of(path):
        yield structure
