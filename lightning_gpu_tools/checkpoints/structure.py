"""The description of a checkpoint: its contents, and its sets of weights."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_gpu_tools.checkpoints.content import MANIFEST, MAX_DEPTH, all_state_dicts, describe_content
from lightning_gpu_tools.checkpoints.faults import Fault, faults_of
from lightning_gpu_tools.checkpoints.zip_records import Record
from lightning_gpu_tools.errors import BrokenCheckpointError
from lightning_gpu_tools.units import printable, printable_path

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
Format = Literal["zip", "legacy", "safetensors", "dcp", "deepspeed"]  # the last two are folders


def check_contents(content: Any, path: object) -> dict[str, Mapping[str, Any]]:
    """Return the result of ``all_state_dicts``; raise if keys or versions have a wrong type."""
    with faults_of(path):
        entries = all_state_dicts(content)
    for entry, weights in entries.items():
        where = f'"{printable(entry)}" of {printable_path(path)}' if entry else printable_path(path)
        odd = [key for key in weights if not isinstance(key, str) or key.count(".") > MAX_DEPTH]
        if odd:
            raise BrokenCheckpointError(
                f"{where} has an invalid key for a weight: {describe_content(odd[0])}. Save the state_dict of a module."
            )
        if not are_versions(getattr(weights, "_metadata", None)):
            raise BrokenCheckpointError(
                f"{where} has invalid _metadata, which must map each module to an integer version. Delete this "
                "attribute of the state_dict, and save it again."
            )
    return entries


def manifest_of(content: Any) -> dict[str, Any]:
    """Return the facts that this package has recorded in a checkpoint."""
    manifest = content.get(MANIFEST) if isinstance(content, Mapping) else None
    if not isinstance(manifest, Mapping):
        return {}
    kinds = {"wrappers": dict, "devices": list, "torch": str, "lightning": str}
    return {name: manifest[name] for name, kind in kinds.items() if isinstance(manifest.get(name), kind)}


def are_versions(metadata: Any) -> bool:
    """Return whether this is valid ``_metadata`` of a state dict: the version of each module."""
    return metadata is None or (
        isinstance(metadata, dict)
        and is_named(metadata)
        and all(isinstance(entry, dict) for entry in metadata.values())
        and all(isinstance(entry.get("version"), (int, type(None))) for entry in metadata.values())
    )


def is_named(value: Any) -> bool:
    """Return whether this is a dictionary with string keys."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


@dataclass(frozen=True)
class Structure:
    """The described contents of a file or a folder of shards."""

    file: Any  # open while it is used; None for a folder
    path: str
    size_bytes: int
    format: Format
    content: Any  # as returned by torch.load, but with descriptions instead of tensors and other objects
    globals: set[str]  # as in StructureReader
    devices: set[str]  # that it was saved from
    metadata: Mapping[str, str] = field(default_factory=dict)  # of a safetensors file
    records: Mapping[str, Record] = field(default_factory=dict)  # of a zip file
    places: Mapping[str, int] = field(default_factory=dict)  # offsets of storages
    filled: set[str] = field(default_factory=set)  # as in StructureReader
    part: Fault | None = None  # set if it is one shard of a checkpoint
    assembly: Assembly | None = None  # of a folder

    @property
    def name(self) -> str:
        """The name of the file in its folder."""
        return os.path.basename(self.path)

    @functools.cached_property
    def entries(self) -> dict[str, Mapping[str, Any]]:
        """All sets of weights by entry name; the name is ``""`` if there is nothing else."""
        return check_contents(self.content, self.path)

    @property
    def files(self) -> Iterable[Structure]:
        """The file itself, or the files of the folder."""
        return [self] if self.assembly is None else self.assembly.shards.values()

    @property
    def has_checksums(self) -> bool:
        """Whether damaged weights can be detected; not in safetensors or in files from before torch 1.6."""
        return all(any(record.crc for record in file.records.values()) for file in self.files)


@dataclass(frozen=True)
class Assembly:
    """Several files whose contents make up one checkpoint."""

    format: Format
    shards: Mapping[str, Structure]
    loaded: tuple[str, ...]  # from the other shards, only numbers are read
    assemble: Callable[[Mapping[str, Any]], Any]  # takes the contents of these, described or loaded


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, which takes half the time of creating many objects and finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Takes the total number of bytes, and returns a function that takes the number done since its last call.
Progress = Callable[[int], Callable[[int], object]]


def no_progress(_: int) -> Callable[[int], object]:
    """Show no progress."""
    return lambda _: None


def compare_with_checksums(structure: Structure, advance: Callable[[int], object] = lambda _: None) -> None:
    """Read a whole file, and compare it with its checksums, if it has any."""
    with faults_of(structure.path):
        for record in structure.records.values():
            for chunk in record.chunks():
                advance(len(chunk))
