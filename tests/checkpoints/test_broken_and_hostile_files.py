"""Broken, foreign and hostile files: each gets an error in words, and nothing in them runs."""

import collections
import dataclasses
import enum
import functools
import io
import os
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from checkpoint_files import (
    EDITS,
    EXPLOIT,
    Exploit,
    described_by,
    lightning_checkpoint,
    overwritten,
    records_of,
    safetensors,
    saved,
    text,
    zipped,
)
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.reading import read_checkpoint, read_weights, verify_checkpoint
from lightning_gpu_tools.checkpoints.sources import read_structure
from lightning_gpu_tools.checkpoints.unsafe_globals import beyond_plain_data
from lightning_gpu_tools.checkpoints.writing import write_checkpoint
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointMismatchError,
    UnsafeCheckpointError,
)

CONTENT = {"epoch": 3, "state_dict": OrderedDict(a=torch.arange(600.0).view(30, 20), b=torch.ones(5))}
GOOD = saved(CONTENT)
LEGACY = saved(CONTENT, _use_new_zipfile_serialization=False)


CONTRADICTION = "its description and its contents do not match"
FAULTS = {
    "empty": (b"", "is empty.*disk was full"),
    "cut in the middle": (GOOD[: len(GOOD) // 2], "is cut short: .*index.*is missing.*interrupted"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer.*git lfs pull"),
    "web page": (b"\n <HTML><head>Sign in", "web page.*login.*Download"),
    "json": (b'{"error": "not found"}', "JSON file"),
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(100), "is compressed .gzip.*Unpack"),
    "plain pickle": (pickle.dumps({"a": 1}), "pickle that torch.save did not write"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(100), "is a GGUF file of llama.cpp.*original files"),
    "photos in a zip": (zipped([("photos/cat.txt", b"meow")]), "zip archive but not a checkpoint.*photos/cat"),
    "damaged zip index": (GOOD.replace(b"PK\x01\x02", b"pk\x01\x02", 1), "is damaged: its records and the index at"),
    "missing record": (zipped([record for record in records_of(GOOD) if "data/1" not in record[0]]), CONTRADICTION),
    "cut legacy file": (LEGACY[: len(LEGACY) // 2], CONTRADICTION),
    "safetensors cut in its header": (struct.pack("<Q", 5000) + b'{"a":', CONTRADICTION),
    "safetensors of another type": (
        safetensors({"a": {"dtype": "F6_E2M3", "shape": [1], "data_offsets": [0, 1]}}),
        "has a of type F6_E2M3, which",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_error_about_a_broken_file_says_what_to_do(fault: str, tmp_path: Path) -> None:
    content, message = FAULTS[fault]
    path = tmp_path / "last.ckpt"
    path.write_bytes(content)
    write_checkpoint(lightning_checkpoint({"a": torch.ones(5)}), tmp_path / "epoch=2.ckpt")
    with pytest.raises(BrokenCheckpointError, match=message) as caught:
        read_checkpoint(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert text.endswith(f" The newest complete checkpoint in that folder: {tmp_path / 'epoch=2.ckpt'}")
    assert "weights_only" not in text
    # The same without torch.
    with pytest.raises(BrokenCheckpointError, match=message):
        read_structure(str(path))


@pytest.mark.follows("The newest complete checkpoint in that folder: ")
def test_the_newest_checkpoint_that_can_take_its_place_is_named(tmp_path: Path) -> None:
    good = saved(lightning_checkpoint(CONTENT["state_dict"]))
    files = {"old.ckpt": good, "newer.ckpt": good, "broken.ckpt": good[:-50], "other.ckpt": saved({}), "a.pt": good}
    for age, (name, data) in enumerate(files.items()):
        (tmp_path / name).write_bytes(data)
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
    for name in ("broken.ckpt", "gone.ckpt"):
        with pytest.raises(
            CheckpointError, match=r"newest complete checkpoint in that folder: .*/newer\.ckpt$"
        ) as broken:
            read_checkpoint(tmp_path / name)
        named = str(broken.value).rpartition("in that folder: ")[2]
        assert torch.equal(read_checkpoint(named)["state_dict"]["a"], CONTENT["state_dict"]["a"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BrokenCheckpointError, match=r"is a JSON file, \"{}\"\. Use the file with the weights\.$"):
        read_checkpoint(tmp_path / "config.json")


def test_a_missing_file_is_also_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Its folder does not exist either"):
        read_checkpoint(tmp_path / "no" / "last.ckpt")


@pytest.mark.parametrize(
    "content",
    [
        lambda it: {"state_dict": it, "pytorch-lightning_version": "2.6.6", "epoch": 1},
        lambda it: {"model": {"weights": it}, "epoch": 1},
        lambda it: {"state_dict": os.mkdir},
        lambda it: it,
        lambda it: {it: torch.ones(2)},
    ],
)
def test_an_object_in_the_place_of_weights_is_named_and_not_opened(
    content: Callable[[Exploit], object], tmp_path: Path
) -> None:
    path, witness = tmp_path / "a.pt", tmp_path / "it ran"
    torch.save(content(Exploit(witness)), path)
    with pytest.raises(UnsafeCheckpointError) as refused:
        load_weights(torch.nn.Linear(2, 2), path)
    words = str(refused.value)
    assert "was not opened. No code in it has run.\n" in words
    assert EXPLOIT in words
    assert f"no weights that can be loaded without opening it, only an object of {EXPLOIT}. Ask its author for" in words
    assert f"load_weights(model, {str(path)!r}, weights_only=False), which runs its code." in words
    assert main(["checkpoint", "convert", str(path), str(tmp_path / "b.pt"), "--weights"]) == 1
    assert [main(["checkpoint", action, str(path)]) for action in ("inspect", "verify")] == [0, 1]
    assert not witness.exists()


def test_a_weight_that_is_an_object_is_named_where_it_is_missing(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    weights = OrderedDict(net.state_dict(), bias=Exploit(tmp_path / "it ran"))
    torch.save(weights, tmp_path / "a.pt")
    torch.distributed.checkpoint.save({"state_dict": weights}, checkpoint_id=tmp_path / "folder", no_dist=True)
    for path in (tmp_path / "a.pt", tmp_path / "folder"):
        words = rf"not opened, because this would run code: bias \({EXPLOIT}\)$"
        with pytest.raises(CheckpointMismatchError, match=words):
            load_weights(net, path)


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (".metadata", "is damaged: its .metadata does not describe a checkpoint"),
        ("__0_0.distcp", "without .metadata, which is written last.*save was interrupted"),
        ("latest", "is a folder without shards of a checkpoint"),
        ("epoch=1.ckpt", r"last\.ckpt/epoch=1\.ckpt is empty"),
    ],
)
def test_a_folder_without_shards_says_what_it_holds(inside: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    folder.mkdir()
    (folder / inside).touch()
    with pytest.raises(BrokenCheckpointError, match=message):
        read_checkpoint(folder)


@pytest.mark.parametrize("new_format", [True, False])
def test_a_malicious_file_is_refused_and_has_not_run(new_format: bool, tmp_path: Path) -> None:
    path, witness = tmp_path / "gift.ckpt", tmp_path / "it ran"
    content = {"state_dict": {"w": torch.ones(2)}, "x": Exploit(witness)}
    torch.save(content, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(UnsafeCheckpointError) as caught:
        read_checkpoint(path)
    text = str(caught.value)
    assert "No code in it has run" in text
    assert "can run code when opened, so open it only if you trust its author: posix.mkdir." in text
    assert "weights_only" not in text
    assert "add_safe_globals" not in text
    structure = read_structure(str(path))
    assert "posix.mkdir" in structure.globals
    assert structure.content["state_dict"]["w"].shape == (2,)
    assert not witness.exists()
    read_checkpoint(path, weights_only=False)
    assert witness.exists(), "the file is harmless, so the test proves nothing"


class Speed(enum.Enum):
    FAST = 1


@dataclasses.dataclass
class Settings:
    speed: Speed = Speed.FAST


def shown(value: object) -> str:
    return repr(value.getvalue() if isinstance(value, io.BytesIO) else value)


def written(value: object) -> tuple[bytes, str]:
    return saved(value), shown(value)


# A file, and what is read from it.
HARMLESS = {
    "enum": written(Speed.FAST),
    "dataclass": written(Settings()),
    "lazy parameter": written(torch.nn.LazyLinear(2).weight),
    "module": written(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())),
    "bytes": written(io.BytesIO(b"abc")),
    "path": written(Path("a")),
    "loss": written(torch.nn.MSELoss()),
    "number": written(np.float64(0.1)),
    "array": written(np.ones(3, dtype=np.int16)),
    "builtins": written([frozenset([1]), slice(1, 2), range(3), str, list]),
    "defaultdict": written(collections.defaultdict(list)),
    "partial": written(functools.partial(torch.optim.Adam, lr=1)),
    "scheduler": written(torch.optim.lr_scheduler.StepLR),
    "path of Windows": (described_by(b"cpathlib\nWindowsPath\n(" + text("a") + b"tR"), "PureWindowsPath('a')"),
    "path by Python 3.13": (described_by(b"cpathlib._local\nPosixPath\n(" + text("a") + b"tR"), "PosixPath('a')"),
}


@pytest.mark.follows("To allow these classes, if you trust them: ")
@pytest.mark.parametrize("name", HARMLESS)
def test_the_suggested_line_allows_what_only_holds_values(name: str, tmp_path: Path) -> None:
    data, value = HARMLESS[name]
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(UnsafeCheckpointError) as caught:
        read_checkpoint(tmp_path / "a.pt")
    line = re.search(r"To allow these classes, if you trust them: (.*)", str(caught.value))[1]  # type: ignore[index]
    before = torch.serialization.get_safe_globals()
    try:
        exec(line, {})  # as a user would paste it
        assert shown(read_checkpoint(tmp_path / "a.pt")) == value
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


@pytest.mark.parametrize("value", [collections.defaultdict(list, a=[1]), collections.deque([1])])
def test_no_line_is_suggested_for_what_torch_never_fills(value: object, tmp_path: Path) -> None:
    torch.save({"hyper_parameters": value}, tmp_path / "a.pt")
    words = r"fills only plain lists and dictionaries: collections\.de"
    with pytest.raises(UnsafeCheckpointError, match=words) as caught:
        read_checkpoint(tmp_path / "a.pt")
    assert "add_safe_globals" not in str(caught.value)


def test_what_torch_refuses_though_allowed_is_not_called_damaged(tmp_path: Path) -> None:
    torch.save({"hyper_parameters": collections.deque([1])}, tmp_path / "last.ckpt")
    with (
        torch.serialization.safe_globals([collections.deque]),
        pytest.raises(UnsafeCheckpointError, match=r"Can only append to lists.*deque") as caught,
    ):
        read_checkpoint(tmp_path / "last.ckpt")
    assert "weights_only" not in str(caught.value)


class Outer:
    class Mode(enum.Enum):
        FAST = 1

    class Config:
        def method(self) -> None: ...


def test_what_lies_inside_a_class_is_foreign_and_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    inside = [Outer.Mode.FAST, Outer.Config(), Outer.Config().method, Outer.Config]
    torch.save({"state_dict": {"w": torch.ones(2)}, "hyper_parameters": inside}, path)
    assert read_structure(path).content["state_dict"]["w"].shape == (2,)
    with pytest.raises(UnsafeCheckpointError, match=r"can run code when opened.*: builtins\.getattr"):
        read_checkpoint(path)


def test_our_list_of_plain_data_is_torchs() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    names = list(_get_allowed_globals())
    assert beyond_plain_data(names) == []
    tempting = ["builtins.eval", "os.system", "torch.load", "torch.hub.load", "torch.nn.Linear", "collections.deque"]
    assert beyond_plain_data(tempting) == sorted(tempting)


@pytest.mark.parametrize("location", ["cuda:7", "mps", "hpu:0"])
def test_files_from_any_device_come_to_the_cpu(location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu.ckpt"
    for new_format in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: location)
            torch.save({"w": torch.arange(3.0)}, path, _use_new_zipfile_serialization=new_format)
        with pytest.raises((RuntimeError, AttributeError, AssertionError)):
            torch.load(path)  # the file really is one that torch alone cannot open here
        weights = read_checkpoint(path)["w"]
        assert weights.device.type == "cpu"
        assert weights.tolist() == [0, 1, 2]
        assert read_structure(path).devices == {location}


# -- fuzzing -------------------------------------------------------------------------------------------------------


def open_in_every_way(path: Path) -> None:
    """Open a file, or see it refused in words; nothing else may come out, and never torch's dangerous advice."""
    for read in (read_checkpoint, read_weights, read_structure, verify_checkpoint):
        message = ""
        try:
            read(path)  # type: ignore[operator]
        except CheckpointError as error:
            message = str(error)
        assert not message or (str(path) in message and "weights_only" not in message)


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


PROGRAMS = st.lists(
    st.sampled_from(
        [
            *(b"}", b"]", b")", b"(", b"N", b"K\x01", b"X\x01\x00\x00\x00a", b"G" + bytes(8), b"\x8a\x01\x05", b"\x8f"),
            *(b"cos\nsystem\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n"),
            *(b"R", b"b", b"s", b"u", b"a", b"e", b"t", b"\x85", b"\x86", b"\x87", b"\x81", b"Q", b"0", b"2", b"\x90"),
            *(b"q\x00", b"h\x00", b"r\xff\xff\xff\xff", b"\x94", b"\x93", b"X\xff\xff\xff\x7f"),
            *(b"\x96\xff\xff\xff\xff\xff\x00\x00\x00", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f"),
        ]
    ),
    max_size=25,
).map(b"".join)


@given(program=PROGRAMS)
def test_no_pickle_program_surprises(tmp_path_factory: pytest.TempPathFactory, program: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "program.ckpt"
    path.write_bytes(described_by(program))
    open_in_every_way(path)
