"""Files of other programs are named, and what the message advises leads to the weights."""

import functools
import gzip
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import refuse_everywhere, safetensors, saved
from torch import nn

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.errors import BrokenCheckpointError

WEIGHTS = nn.Linear(3, 2).state_dict()


def unpacked(path: Path) -> None:
    torch.save(WEIGHTS, path.parent / "m.pt")
    with zipfile.ZipFile(path.parent / "m.pt") as archive:
        archive.extractall(path)


def compressed(path: Path) -> None:
    unpacked(path.parent / "there")
    shutil.make_archive(str(path.parent / "made"), "zip", path.parent / "there")
    (path.parent / "made.zip").rename(path)


@pytest.mark.skipif(not shutil.which("zip"), reason="zip is not installed")
@pytest.mark.follows("zip -0 -r {}.zip {}", "unpacked && cd unpacked")
@pytest.mark.parametrize(
    ("make", "name", "called"),
    [
        (unpacked, "folder", "is an unpacked checkpoint"),
        (lambda path: unpacked(path.parents[1]), "folder/m/data.pkl", "is an unpacked checkpoint"),
        (compressed, "it's a.pt", "another program has compressed"),
    ],
)
def test_what_a_zip_program_has_made_is_zipped_again(
    make: Callable[[Path], None], name: str, called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "given to me" / name
    (tmp_path / "given to me").mkdir()
    make(path)
    words = refuse_everywhere(path, called)
    command = re.search(r": ((cd|python) .*)$", words)[1]  # type: ignore[index]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, shell=True, check=True, env=environment, capture_output=True)
    (made,) = tmp_path.rglob("m.zip")
    load_weights(model := nn.Linear(3, 2), made)
    assert torch.equal(model.weight, WEIGHTS["weight"])


def program(path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(3, 2), (torch.ones(1, 3),)), path)


def package(path: Path) -> None:
    with torch.package.PackageExporter(path) as exporter:
        exporter.extern("**")
        exporter.save_pickle("my.model", "net.pkl", nn.Linear(3, 2))


def in_tar(path: Path) -> None:
    torch.save(WEIGHTS, path.parent / "m.pt")
    with tarfile.open(path, "w:") as archive:
        archive.add(path.parent / "m.pt", "m.pt")


def in_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("models/best one.pt", saved(WEIGHTS))


ARRAYS = {key: value.numpy() for key, value in WEIGHTS.items()}
torch_load = functools.partial(torch.load, weights_only=False)


@pytest.mark.follows("torch.save({name: torch.as_tensor(array) for name, array in arrays")
@pytest.mark.parametrize(
    ("make", "called", "load"),
    [
        (lambda path: np.savez(path.open("wb"), **ARRAYS), "holds NumPy arrays (.npz)", np.load),
        (
            lambda path: path.write_bytes(pickle.dumps(ARRAYS)),
            "such as Detectron2's",
            lambda path: pickle.loads(path.read_bytes()),
        ),
        (lambda path: torch.save(ARRAYS, path), "holds NumPy arrays instead of tensors", torch_load),
    ],
)
def test_numpy_arrays_are_saved_as_tensors(
    make: Any, called: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a file")
    with pytest.raises(BrokenCheckpointError) as refusal:
        load_weights(nn.Linear(3, 2), tmp_path / "a file")
    words = str(refusal.value)
    assert called in words
    exec(words.partition("save its arrays as tensors: ")[2], {"torch": torch, "arrays": load(tmp_path / "a file")})
    load_weights(model := nn.Linear(3, 2), "weights.pt")
    assert torch.equal(model.weight, WEIGHTS["weight"])


def hdf5(path: Path) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        file["weight"] = ARRAYS["weight"]


# By name of a file: its bytes, or what writes it, and what the message says.
NAMED: dict[str, tuple[bytes | Callable[[Path], Any], str]] = {
    "empty.ckpt": (b"", "is empty. Probably the disk was full"),
    "cut.ckpt": (saved(WEIGHTS)[:300], "is cut short: .*index.*is missing.*interrupted"),
    "cut.safetensors": (safetensors(b"{" * 99)[:50], "is damaged: its description and its contents do not match"),
    "new.safetensors": (
        safetensors({"a": {"dtype": "F6_E2M3", "shape": [1], "data_offsets": [0, 1]}}),
        "has a of type F6_E2M3, which",
    ),
    "program.pt2": (program, "is a program by torch.export. Use the checkpoint that it was exported from"),
    "package.pt": (package, "is a torch.package archive"),
    "m.tar": (in_tar, "is a tar archive. Unpack it, and use the checkpoint inside"),
    "outer.zip": (in_zip, "is a zip archive but not a checkpoint; it holds models/best one.pt. Unpack it"),
    "m.pt.gz": (gzip.compress(saved(WEIGHTS)), "is compressed .gzip.*Unpack it"),
    "script.pt": (lambda path: torch.jit.script(nn.Linear(3, 2)).save(path), "is a TorchScript program. Use the"),
    "weights.h5": (hdf5, "is an HDF5 file, as Keras writes"),
    "model.onnx": (b"\x08\x08\x12\x07pytorch" + bytes(64), "is an ONNX model"),
    "model.tflite": (b"\x1c\0\0\0TFL3", "is a TFLite model"),
    "lfs.pt": (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, .*: git lfs pull$"),
    "hf.bin": (b"Entry not found", 'is a text file, "Entry not found". .*download it again'),
    "page.pt": (b"\xef\xbb\xbf <HTML><body>Sign in", 'is a web page .*, "Sign in". Download the file itself'),
}


@pytest.mark.parametrize("name", NAMED)
def test_other_files_are_named(name: str, tmp_path: Path) -> None:
    data, words = NAMED[name]
    if isinstance(data, bytes):
        (tmp_path / name).write_bytes(data)
    else:
        data(tmp_path / name)
    refuse_everywhere(tmp_path / name, f"{tmp_path / name} {words}")
