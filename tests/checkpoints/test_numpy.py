"""NumPy's arrays in files of torch, in pickles of other programs and in .npz: tensors, without running code."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import EDITS, Exploit, overwritten, refuse_everywhere, zipped
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from wrapped_models import contents, fill

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.reading import read_checkpoint, read_weights
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError, UnsafeCheckpointError


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


SOURCE = net()
fill(SOURCE, 1)
ARRAYS = {key: value.numpy() for key, value in SOURCE.state_dict().items()}
DETECTRON = {"model": ARRAYS, "__author__": "Detectron2 Model Zoo", "matching_heuristics": True}


def pickled(content: Any, protocol: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(pickle.dumps(content, protocol))


def in_zip(**arrays: Any) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, **arrays)

    return write


FILES: dict[str, Callable[[Path], object]] = {
    **{f"Detectron2, protocol {protocol}": pickled(DETECTRON, protocol) for protocol in (2, 3, 4, 5)},
    "a pickle of the arrays alone": pickled(ARRAYS, 4),
    ".npz": in_zip(**ARRAYS),
    ".npz with folders": in_zip(**{f"module.{key}": value for key, value in ARRAYS.items()}),
    "torch": lambda path: torch.save(DETECTRON, path),
    "torch before 1.6": lambda path: torch.save(DETECTRON, path, _use_new_zipfile_serialization=False),
    "torch, protocol 5": lambda path: torch.save(ARRAYS, path, pickle_protocol=5),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_arrays_are_loaded_as_tensors(name: str, weights_only: bool, tmp_path: Path) -> None:
    path, model = tmp_path / "a.pkl", net()
    FILES[name](path)
    report = load_weights(model, path, weights_only=weights_only)
    assert contents(model) == contents(SOURCE)
    assert report.unread == ()
    path.write_bytes(bytes(path.stat().st_size))
    assert contents(model) == contents(SOURCE)


@pytest.mark.parametrize("name", [name for name in FILES if "torch" not in name])
def test_other_commands_take_them_too(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.pkl"
    FILES[name](path)
    for target in ("a.pt", "a.safetensors"):
        assert main(["checkpoint", "convert", str(path), str(tmp_path / target)]) == 0
        load_weights(model := net(), tmp_path / target)
        assert contents(model) == contents(SOURCE)
    assert main(["checkpoint", "inspect", str(path)]) == 0
    assert "0.weight" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(path)]) == 0


ODD = {
    "objects": np.array([{}, 1], dtype=object),
    "text": np.array(["a", "b"]),
    "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "fields": np.zeros(2, dtype=[("x", "f4"), ("y", "i4")]),
    "another byte order": np.ones(2, dtype=">f4" if np.little_endian else "<f4"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("write", ["pickle", "torch", "npz"])
def test_arrays_of_other_things_than_numbers_are_left_unread(write: str, odd: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    arrays = {**ARRAYS, "odd": ODD[odd]}
    if write == "npz":
        in_zip(**arrays)(path)
    elif write == "torch":
        torch.save({"model": arrays}, path)
    else:
        pickled({"model": arrays}, 4)(path)
    report = load_weights(model := net(), path)
    assert contents(model) == contents(SOURCE)
    assert "not read, because opening would run code: numpy." in str(report)


def test_nothing_in_a_pickle_is_run(tmp_path: Path) -> None:
    path, witness = tmp_path / "a.pkl", tmp_path / "it ran"
    pickled({**DETECTRON, "gift": Exploit(witness)}, 2)(path)
    assert load_weights(net(), path).unread == ("posix.mkdir",)
    with pytest.raises(UnsafeCheckpointError, match=r"(?s)No code in it has run.*posix\.mkdir.*load_weights\(model, "):
        read_checkpoint(path)
    pickled({"model": {**ARRAYS, "0.weight": Exploit(witness)}}, 2)(path)
    with pytest.raises(CheckpointError, match="not opened, because this would run code"):
        load_weights(net(), path)
    assert not witness.exists()
    read_checkpoint(path, weights_only=False)
    assert witness.exists()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("code", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1", "c8", "c16"])
def test_each_type_and_shape_of_numbers_is_the_same(code: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 9, shape).astype(code)
    twins = {"c": array, "f": np.asfortranarray(array), "t": array.T, "again": array, "rest": np.ones(9)}
    torch.save({"w": torch.ones(2)}, tmp_path / "plain.pt")
    for protocol in (2, 4, 5):
        pickled(twins, protocol)(tmp_path / f"{protocol}.pkl")
    in_zip(**twins)(tmp_path / "a.npz")
    for path in (*tmp_path.glob("*.pkl"), tmp_path / "a.npz"):
        loaded, _ = read_weights(path)
        for name, expected in twins.items():
            assert loaded[name].shape == expected.shape
            assert np.array_equal(loaded[name].numpy(), expected)
        assert loaded["c"].dtype == torch.from_numpy(np.array(array)).dtype
        assert loaded["c"].numpy().dtype == array.dtype
    assert loaded["again"] is not loaded["c"]  # in .npz


def test_an_array_in_two_places_stays_one_tensor(tmp_path: Path) -> None:
    array = np.ones((2, 3), dtype="f4")
    pickled({"embed": array, "head": array}, 4)(tmp_path / "a.pkl")
    torch.save({"embed": array, "head": array}, tmp_path / "a.pt")
    for path in (tmp_path / "a.pkl", tmp_path / "a.pt"):
        weights, _ = read_weights(path)
        assert weights["embed"].data_ptr() == weights["head"].data_ptr()


def array_of_python_2(name: bytes, raw: bytes) -> bytes:
    """Return an array of float32 as Python 2 pickles it: its bytes are text."""
    state = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89"
    dtype = b"cnumpy\ndtype\nU\x02f4K\0K\x01\x87R(K\x03U\x01<" + state
    start = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R(K\x01K"
    size = bytes([len(raw) // 4])
    return b"U" + bytes([len(name)]) + name + start + size + b"\x85" + dtype + b"U" + bytes([len(raw)]) + raw + b"tb"


def test_a_pickle_of_python_2_is_read(tmp_path: Path) -> None:
    array = np.array([-1.5, 3e38, np.pi], dtype="f4")
    program = array_of_python_2(b"w", array.tobytes())
    (tmp_path / "a.pkl").write_bytes(b"\x80\x02}" + program + b"s.")
    assert pickle.loads((tmp_path / "a.pkl").read_bytes(), encoding="latin1")["w"].tolist() == array.tolist()
    assert read_weights(tmp_path / "a.pkl")[0]["w"].tolist() == array.tolist()


# -- advice ------------------------------------------------------------------------------------------------------------


@pytest.mark.follows("Save it again without compression: ")
def test_a_compressed_archive_is_saved_again_without_compression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez_compressed("a.npz", **ARRAYS)
    with pytest.raises(BrokenCheckpointError, match="is compressed by numpy") as refusal:
        load_weights(net(), "a.npz")
    exec(str(refusal.value).partition("without compression: ")[2], {"numpy": np})
    load_weights(model := net(), "weights.npz")
    assert contents(model) == contents(SOURCE)


@pytest.mark.follows("Save it with torch.save or as safetensors")
def test_a_pickle_without_arrays_is_saved_by_torch(tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    for content in (SOURCE.state_dict(), SOURCE, [1, 2], {"a": {"lr": 1}}):
        pickled(content, 4)(path)
        refuse_everywhere(path, "is a Python pickle that torch.save did not write")
    pickled(SOURCE.state_dict(), 4)(path)
    torch.save(pickle.loads(path.read_bytes()), tmp_path / "a.pt")
    load_weights(model := net(), tmp_path / "a.pt")
    assert contents(model) == contents(SOURCE)


# -- broken and hostile files ------------------------------------------------------------------------------------------


def npz(header: bytes, numbers: bytes = bytes(8), start: bytes = b"\x93NUMPY\1\0") -> bytes:
    return zipped([("w.npy", start + len(header).to_bytes(2, "little") + header + numbers)])


def header(shape: str = "(2,)", code: str = "<f4", order: str = "False") -> bytes:
    return f"{{'descr': '{code}', 'fortran_order': {order}, 'shape': {shape}}}".encode()


HOSTILE = {
    "more numbers than there are": npz(header("(3,)")),
    "fewer numbers than there are": npz(header("(1,)")),
    "more numbers than 64 bits": npz(header(f"({2**40}, {2**40})")),
    "a negative size": npz(header("(-2, -1)")),
    "a number as its shape": npz(header("2")),
    "a list as its shape": npz(header("[2]")),
    "a call in the header": npz(b"__import__('os').getcwd()"),
    "a header that nests": npz(b"(" * 9000 + b")" * 9000),
    "a header of another version": npz(header(), start=b"\x93NUMPY\7\0"),
    "no header": npz(b"", start=b"\x93NUMPY\1\0"),
    "no array": zipped([("w.npy", b"text")]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_contradicts_its_array_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(HOSTILE[case])
    refuse_everywhere(path, "is damaged: its description and its contents do not match")


def test_an_archive_without_numbers_is_refused(tmp_path: Path) -> None:
    in_zip(names=np.array(["a"]))(tmp_path / "a.npz")
    refuse_everywhere(tmp_path / "a.npz", "holds no arrays of numbers that torch has")


def test_a_flipped_bit_in_an_archive_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.npz"
    in_zip(**ARRAYS)(path)
    data = bytearray(path.read_bytes())
    data[data.index(ARRAYS["0.weight"].tobytes())] ^= 1
    path.write_bytes(data)
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert "checksum of the record 0.weight.npy" in capsys.readouterr().err


@given(edits=EDITS, name=st.sampled_from([*FILES]))
def test_edited_files_are_loaded_or_refused(
    edits: list[tuple[float, bytes]], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "edited"
    FILES[name](path)
    path.write_bytes(overwritten(path.read_bytes(), edits))
    try:
        load_weights(net(), path)
    except CheckpointError:
        return
