"""Broken files: each gets an error in words that says what to do, and damage never changes what is loaded."""

import os
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    EDITS,
    open_in_every_way,
    overwritten,
    records_of,
    refuse_everywhere,
    safetensors,
    saved,
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
CONTRADICTION = "its description and its contents do not match"


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


def with_folders() -> bytes:
    """Zip like ``zip -0 -r``."""
    return zipped([("archive/", b""), ("archive/data/", b""), *sorted(records_of(GOOD))])


@pytest.mark.parametrize("data", [GOOD, with_folders()], ids=["torch.save", "zip -0 -r"])
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


def resized(change: Callable[[bytes], bytes]) -> bytes:
    """Change the record of the first block of numbers."""
    return zipped([(name, change(data) if name.endswith("data/0") else data) for name, data in records_of(GOOD)])


AMBIGUOUS = {
    "two descriptions": zipped([*records_of(GOOD), records_of(OTHER)[0]]),
    "another program has compressed": zipped(records_of(GOOD), zipfile.ZIP_DEFLATED),
    "a record too short": resized(lambda data: data[:-4]),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_zip_that_says_two_things_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(AMBIGUOUS[case])
    refuse_everywhere(path, f"duplicated|{CONTRADICTION}|another program has compressed.*zip -0 -r")


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


# -- safetensors -------------------------------------------------------------------------------------------------------


def entry(start: int, end: int, shape: object, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "an overlap": safetensors({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, bytes(4)),
    "a header nested deep": safetensors(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "no elements, but sizes beyond 64 bits": safetensors({"a": entry(0, 0, [2**62, 2**62, 0])}),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_safetensors_header_that_contradicts_the_file_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    path.write_bytes(HEADERS[case])
    refuse_everywhere(path, CONTRADICTION)
