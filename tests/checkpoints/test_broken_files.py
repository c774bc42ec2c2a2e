"""Broken files: each gets an error in words that says what to do, and damage never changes what is loaded."""

import os
import random
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    EDITS,
    described_by,
    number,
    open_in_every_way,
    overwritten,
    records_of,
    refuse_everywhere,
    safetensors,
    saved,
    sizes,
    storage,
    tensor,
    zipped,
)
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.checkpoints.formats import read_structure
from lightning_gpu_tools.checkpoints.reading import read_checkpoint, verify_checkpoint
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError

CONTENT = OrderedDict(weight=torch.arange(600.0).view(20, 30), bias=torch.linspace(-1, 1, 20))
GOOD = saved(CONTENT)
OTHER = saved(OrderedDict(weight=torch.zeros(20, 30), bias=torch.zeros(20)))
LEGACY = saved(CONTENT, _use_new_zipfile_serialization=False)


def test_a_missing_file_is_also_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Its folder does not exist either"):
        read_checkpoint(tmp_path / "no" / "last.ckpt")


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (".metadata", "is damaged: its .metadata does not describe a checkpoint"),
        ("__0_0.distcp", "without .metadata, which is written last.*save was interrupted"),
        ("epoch=1.ckpt", r"last\.ckpt/epoch=1\.ckpt is empty"),
    ],
)
def test_a_folder_without_shards_says_what_it_holds(inside: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    folder.mkdir()
    (folder / inside).touch()
    with pytest.raises(BrokenCheckpointError, match=message):
        read_checkpoint(folder)


@pytest.mark.parametrize("location", ["cuda:7", "hpu:0"])
def test_files_from_any_device_come_to_the_cpu(location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu.ckpt"
    for new_format in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: location)
            torch.save({"w": torch.arange(3.0)}, path, _use_new_zipfile_serialization=new_format)
        with pytest.raises((RuntimeError, AttributeError, AssertionError)):
            torch.load(path)  # the file really is one that torch alone cannot open here
        weights = read_checkpoint(path)["w"]
        assert (weights.device.type, weights.tolist()) == ("cpu", [0, 1, 2])
        assert read_structure(path).devices == {location}


# -- zip files -----------------------------------------------------------------------------------------------------


WITH_FOLDERS = zipped([("archive/", b""), ("archive/data/", b""), *sorted(records_of(GOOD))])


@pytest.mark.parametrize("data", [GOOD, WITH_FOLDERS], ids=["torch.save", "zip -0 -r"])
def test_whatever_wrote_the_zip_its_weights_load_to_the_bit(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(data)
    for weights_only in (True, False):
        loaded = read_checkpoint(path, weights_only=weights_only, verify=True)
        assert str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")  # mapped
        assert [*loaded] == [*CONTENT]
        assert all(torch.equal(loaded[name], CONTENT[name]) for name in CONTENT)
        del loaded
    assert verify_checkpoint(str(path))[0].has_checksums


def test_no_flipped_bit_changes_what_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    places = random.Random(0)
    loaded = 0
    for _ in range(60):
        damaged = bytearray(GOOD)
        damaged[places.randrange(len(GOOD))] ^= 1 << places.randrange(8)
        path.write_bytes(damaged)
        try:
            content = read_checkpoint(path, verify=True)
        except CheckpointError:
            continue
        loaded += 1
        assert all(torch.equal(content[name], CONTENT[name]) for name in CONTENT)
    assert loaded, "no bit was without meaning, so nothing was loaded"


def test_a_file_replaced_after_the_check_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    path.write_bytes(GOOD)
    other.write_bytes(OTHER)
    from_file = torch.from_file

    def replace_and_map(*args: Any, **kwargs: Any) -> Any:
        os.replace(other, path)
        return from_file(*args, **kwargs)

    monkeypatch.setattr(torch, "from_file", replace_and_map)
    assert torch.equal(read_checkpoint(path, verify=True)["weight"], CONTENT["weight"])
    assert not other.exists()


@given(
    source=st.sampled_from([GOOD, LEGACY]),
    edits=EDITS,
    kept=st.just(1.0) | st.floats(0, 1),
    tail=st.binary(max_size=20),
)
def test_no_damage_surprises(
    tmp_path_factory: pytest.TempPathFactory, source: bytes, edits: list[tuple[float, bytes]], kept: float, tail: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.ckpt"
    path.write_bytes(overwritten(source, edits)[: int(kept * len(source))] + tail)
    open_in_every_way(path)


# -- files that contradict themselves ----------------------------------------------------------------------------------


def resized(change: Callable[[bytes], bytes]) -> bytes:
    """Change the record of the first block of numbers."""
    return zipped([(name, change(data) if name.endswith("data/0") else data) for name, data in records_of(GOOD)])


def entry(start: int, end: int, shape: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


DEEP = 100_000
OLD, ONES = saved({"w": torch.ones(4)}, _use_new_zipfile_serialization=False), struct.pack("<4f", 1, 1, 1, 1)
OLD_KEYS = OLD.index(b"]q", OLD.index(b"OrderedDict"))
CONTRADICTORY = {
    "two descriptions": zipped([*records_of(GOOD), records_of(OTHER)[0]]),
    "a record too short": resized(lambda data: data[:-4]),
    # Descriptions that contradict the file, and those that torch.save does not write.
    "more numbers than the record has": described_by(tensor(storage(5))),
    "an unknown dtype": described_by(tensor(storage(4, kind="FancyStorage"))),
    "a shape beyond the storage": described_by(tensor(storage(), 0, sizes(5))),
    "more elements than 64 bits": described_by(tensor(storage(), 0, sizes(2**40, 2**40), sizes(0, 0))),
    "a negative offset": described_by(tensor(storage(), -1)),
    "a state for a tensor": described_by(
        tensor(storage()) + b"(" + tensor(storage()) + number(0) + sizes(9) + sizes(1) + b"tb"
    ),
    "a key nested so deep that hashing ends the process": described_by(b"})" + b"\x85" * DEEP + number(1) + b"s"),
    "copies of copies": described_by(
        b"](" + number(7) * 5000 + b"eq\0(c__builtin__\nset\nq\1" + b"h\1h\0\x85R" * 1000 + b"t"
    ),
    "a string beyond the file": described_by(b"\x8e" + struct.pack("<Q", 1 << 50) + b"abc"),
    # Safetensors.
    "an overlap": safetensors({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, bytes(4)),
    "a header nested deep": safetensors(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "no elements, but sizes beyond 64 bits": safetensors({"a": entry(0, 0, [2**62, 2**62, 0])}),
    # Torch would leave the memory as it is.
    "an old file without storages": OLD[:OLD_KEYS] + b"]." + OLD[OLD.rindex(b"\x04" + bytes(7)) :],
    "an old file's storage of another length": OLD.replace(b"\4" + bytes(7) + ONES, b"\3" + bytes(7) + ONES),
}


@pytest.mark.parametrize("case", CONTRADICTORY)
def test_a_file_that_contradicts_itself_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(CONTRADICTORY[case])
    refuse_everywhere(path, "its description and its contents do not match|duplicated")
