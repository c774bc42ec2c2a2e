"""Folders that contradict themselves or were made to do harm: refused in words, and nothing in them runs."""

import contextlib
import json
import pickle
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import Exploit, records_of, refuse_everywhere, zipped
from sharded_checkpoints import divided, write_deepspeed, write_distributed, write_index
from torch.distributed.checkpoint.metadata import Metadata

from lightning_gpu_tools.checkpoints.formats import read_structure
from lightning_gpu_tools.checkpoints.reading import read_checkpoint, verify_checkpoint
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError

WEIGHTS = {"a": torch.rand(4, 3), "b": torch.rand(3), "c": torch.rand(2)}
SECOND, PARALLEL = "model-00002-of-00002.safetensors", "mp_rank_01_model_states.pt"
Edit = Callable[[Path], object]


def in_index(edit: Callable[[dict[str, str]], object]) -> Edit:
    def change(index: Path) -> None:
        content = json.loads(index.read_text())
        edit(content["weight_map"])
        index.write_text(json.dumps(content))

    return change


def in_metadata(edit: Callable[[Metadata], object]) -> Edit:
    def change(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        edit(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return change


def place(metadata: Metadata, key: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)  # type: ignore[union-attr]


def in_file(pattern: str, edit: Callable[[dict[str, Any]], object]) -> Edit:
    def change(folder: Path) -> None:
        file = next((folder / "tag").glob(pattern))
        content = torch.load(file)
        edit(content)
        torch.save(content, file)

    return change


def turn_bytes(folder: Path) -> None:
    file = next((folder / "tag").glob("zero_pp_rank_1*"))
    other = {"little": b"big", "big": b"little"}[sys.byteorder]
    records = [(name, other if name.endswith("byteorder") else data) for name, data in records_of(file.read_bytes())]
    file.write_bytes(zipped(records))


def move_outside(folder: Path) -> None:
    (folder / "tag").rename(folder.parent / "elsewhere")
    (folder / "latest").write_text("../elsewhere")


def index(folder: Path) -> Path:
    return write_index(folder, WEIGHTS, 2)


def distributed(folder: Path) -> Path:
    return write_distributed(folder, {"a": divided(WEIGHTS["a"].clone(), [1]), "b": WEIGHTS["b"]})


def zero(stage: int) -> Callable[[Path], Path]:
    return lambda folder: write_deepspeed(folder, [WEIGHTS], 2, stage)


OUTSIDE = "refers to a file outside its own folder.*It was not opened"


@pytest.mark.parametrize(
    ("make", "edit", "message"),
    [
        (index, in_index(lambda files: files.update(c="../other.safetensors")), OUTSIDE),
        (index, in_index(lambda files: files.update(d=SECOND)), f"{SECOND} does not hold d"),
        (index, in_index(lambda files: files.pop("b")), "model-00001-of-00002.safetensors also holds b"),
        (distributed, in_metadata(lambda m: setattr(place(m, "a"), "relative_path", "../secret.pt")), OUTSIDE),
        (distributed, in_metadata(lambda m: setattr(place(m, "b"), "length", 1 << 40)), "cut short|does not describe"),
        (distributed, in_metadata(lambda m: m.state_dict_metadata["a"].chunks.pop()), "parts of a do not make up its"),
        (
            zero(2),
            in_file("mp*", lambda c: c["param_shapes"][0].update(a=torch.Size([9, 9]))),
            "do not describe a ZeRO",
        ),
        (zero(3), in_file("*_0_*_m*", lambda c: c["module"].update(new=torch.zeros(0))), "has the numbers of new"),
        (
            zero(2),
            in_file("*_1_*", lambda c: c["optimizer_state_dict"].update(partition_count=4)),
            "from 4 ranks, but .* 2",
        ),
        (zero(2), turn_bytes, "was written on a machine with another byte order.*Convert it"),
        (zero(1), lambda folder: (folder / "tag" / PARALLEL).touch(), f"parallelism other than ZeRO \\({PARALLEL}\\)"),
        (zero(1), move_outside, "is a folder without shards of a checkpoint"),  # `latest` names folders inside
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(make: Any, edit: Edit, message: str, tmp_path: Path) -> None:
    source = make(tmp_path / "folder")
    edit(source)
    refuse_everywhere(source, message)


def test_a_folder_of_links_is_one_checkpoint(tmp_path: Path) -> None:
    write_index(tmp_path / "blobs", WEIGHTS, 2)
    (tmp_path / "snapshot").mkdir()
    for blob in (tmp_path / "blobs").iterdir():  # as in the cache of Hugging Face Hub
        (tmp_path / "snapshot" / blob.name).symlink_to(blob)
    assert torch.equal(read_checkpoint(tmp_path / "snapshot")["a"], WEIGHTS["a"])
    (tmp_path / "snapshot" / SECOND).unlink()
    (tmp_path / "snapshot" / SECOND).symlink_to(tmp_path / "gone")
    refuse_everywhere(tmp_path / "snapshot", "not complete: 1 of 2 files are missing")


def test_nothing_in_a_folder_runs(tmp_path: Path) -> None:
    folder, witness = write_distributed(tmp_path / "dcp", {**WEIGHTS, "x": {"y": 1}}), tmp_path / "it ran"
    in_metadata(lambda metadata: setattr(metadata, "planner_data", {"x": Exploit(witness)}))(folder)
    for act in (read_structure, verify_checkpoint, read_checkpoint):
        with contextlib.suppress(CheckpointError):
            act(folder)
    assert not witness.exists()
    torch.distributed.checkpoint.FileSystemReader(folder).read_metadata()
    assert witness.exists(), "the folder is harmless, so the test proves nothing"


def test_metadata_that_contradicts_the_files_is_refused_before_loading(tmp_path: Path) -> None:
    folder = write_distributed(tmp_path / "dcp", {"a": torch.rand(6)})
    other = write_distributed(tmp_path / "other", {"a": torch.zeros(6, dtype=torch.int32)})
    shutil.copy(other / ".metadata", folder / ".metadata")
    read_structure(folder)  # tells what it is said to hold
    for act in (verify_checkpoint, read_checkpoint):
        words = r"__0_0.distcp does not hold the part of a that .metadata describes"
        with pytest.raises(BrokenCheckpointError, match=words):
            act(folder)


@pytest.mark.parametrize("key", ["a", "step"])
def test_verify_finds_a_flipped_bit_in_any_place(key: str, tmp_path: Path) -> None:
    folder = write_distributed(tmp_path / "dcp", {"a": divided(torch.full((64,), 7.0), [9]), "step": [*range(1000)]})
    assert verify_checkpoint(folder)[0].has_checksums
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[data.rindex(struct.pack("<4f", 7, 7, 7, 7)) if key == "a" else data.rindex(b"M\x00\x01M\x01\x01") + 1] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    words = r"__0_0\.distcp is damaged: the checksum of the record .* is wrong"
    with pytest.raises(BrokenCheckpointError, match=words):
        verify_checkpoint(folder)
