"""Files of other programs: each message names the file, and doing what it advises ends with loaded weights."""

import ast
import io
import os
import pickle
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from checkpoint_files import records_of, saved, zipped
from torch import nn

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.reading import read_checkpoint, verify_checkpoint
from lightning_gpu_tools.checkpoints.sources import read_structure
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointNotFoundError, UnsafeCheckpointError

WEIGHTS = nn.Linear(3, 2).state_dict()


def net() -> nn.Module:
    return nn.Linear(3, 2)


def trained() -> nn.Module:
    model = net()
    model.load_state_dict(WEIGHTS)
    return model


def is_loaded(model: nn.Module) -> bool:
    return all(torch.equal(value, WEIGHTS[key]) for key, value in model.state_dict().items())


def refused(path: Path) -> str:
    """Return what every way to open a file says about it."""
    words = set()
    for way in (read_structure, verify_checkpoint, read_checkpoint, lambda path: load_weights(net(), path)):
        with pytest.raises(BrokenCheckpointError) as caught:
            way(path)
        words.add(str(caught.value))
    assert len(words) == 1
    return words.pop()


# -- what the advice leads to --------------------------------------------------------------------------------------


def onnx_model(path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    weights = [onnx.numpy_helper.from_array(value.numpy(), key) for key, value in WEIGHTS.items()]
    graph = onnx.helper.make_graph([], "net", [], [], weights)
    onnx.save(onnx.helper.make_model(graph), path)


def onnx_by_torch(path: Path) -> None:
    pytest.importorskip("onnx")
    torch.onnx.export(trained(), (torch.ones(1, 3),), str(path), dynamo=False)


def hdf5(path: Path, **options: Any) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w", **options) as file:
        file.attrs["backend"] = "torch"
        for key, value in WEIGHTS.items():
            file[key] = value.numpy()


def keras(path: Path) -> None:
    hdf5(path.with_suffix(".h5"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.write(path.with_suffix(".h5"), "model.weights.h5")


def program(path: Path) -> None:
    torch.export.save(torch.export.export(trained(), (torch.ones(1, 3),)), path)


def package(path: Path) -> None:
    with torch.package.PackageExporter(path) as exporter:
        exporter.extern("**")
        exporter.save_pickle("my.model", "net.pkl", trained())


def packed_by(command: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        if not shutil.which(command.split()[0]):
            pytest.skip(f"{command.split()[0]} is not installed")
        torch.save(WEIGHTS, path.parent / "m.pt")
        with path.open("wb") as packed:
            subprocess.run([*command.split(), path.parent / "m.pt"], stdout=packed, check=True)

    return make


def seven_zip(path: Path) -> None:
    if not shutil.which("7z"):
        pytest.skip("7z is not installed")
    torch.save(WEIGHTS, path.parent / "m.pt")
    subprocess.run(["7z", "a", "made.7z", "m.pt"], cwd=path.parent, check=True, capture_output=True)
    (path.parent / "made.7z").rename(path)


def tar(path: Path, mode: str = "w:") -> None:
    torch.save(WEIGHTS, path.parent / "m.pt")
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        archive.add(path.parent / "m.pt", "run 1/m.pt")


def tar_of_torch_0_1(path: Path) -> None:
    """Write a checkpoint as torch 0.1 did: the reader in today's torch describes it."""
    storages, tensors, content = io.BytesIO(), io.BytesIO(), io.BytesIO()
    for file in (storages, tensors):
        file.write(pickle.dumps(len(WEIGHTS), 2))
    keys = {id(value): number for number, value in enumerate(WEIGHTS.values())}
    for value in WEIGHTS.values():
        key = keys[id(value)]
        storages.write(pickle.dumps((key, "cpu", torch.FloatStorage), 2))
        storages.write(struct.pack("<q", value.numel()) + value.numpy().tobytes())
        tensors.write(pickle.dumps((key + 10, key, torch.FloatTensor), 2))
        tensors.write(struct.pack("<ii", value.dim(), 0))
        tensors.write(struct.pack(f"<{2 * value.dim() + 1}q", *value.shape, *value.stride(), 0))
    storages.write(pickle.dumps([], 2))

    class Pickler(pickle._Pickler):  # type: ignore[name-defined, misc]
        def persistent_id(self, value: Any) -> str | None:
            return str(keys[id(value)] + 10) if isinstance(value, torch.Tensor) else None

    Pickler(content, 2).dump(dict(WEIGHTS))
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as archive:
        system = io.BytesIO(pickle.dumps({}, 2))
        for name, part in {"sys_info": system, "pickle": content, "tensors": tensors, "storages": storages}.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(part.getvalue()), 1.5  # type: ignore[assignment]
            archive.addfile(member, io.BytesIO(part.getvalue()))


def unpacked(path: Path) -> None:
    torch.save(WEIGHTS, path.parent / "m.pt")
    with zipfile.ZipFile(path.parent / "m.pt") as archive:
        archive.extractall(path)


def zipped_again(*names: str, folder: str = ".") -> Callable[[Path], None]:
    """Return a maker of a zip file of an unpacked checkpoint, as file managers make them."""

    def make(path: Path) -> None:
        unpacked(path.parent / "there")
        (path.parent / "there" / "__MACOSX").mkdir()
        (path.parent / "there" / "__MACOSX" / "._m").touch()
        archive = path.parent / "made.zip"
        inside = path.parent / "there" / folder
        subprocess.run(["zip", "-q", "-r", archive, *(names or os.listdir(inside))], cwd=inside, check=True)
        archive.rename(path)

    return make


def outer_zip(path: Path) -> None:
    torch.save(WEIGHTS, path.parent / "m.pt")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("notes.txt", "mine")
        archive.write(path.parent / "m.pt", "models/best one.pt")


def in_other_byte_order(path: Path) -> None:
    other = {"little": b"big", "big": b"little"}[sys.byteorder]

    def swapped(name: str, data: bytes) -> bytes:
        if name.endswith("byteorder"):
            return other
        return np.frombuffer(data, np.float32).byteswap().tobytes() if "/data/" in name else data

    path.write_bytes(zipped([(name, swapped(name, data)) for name, data in records_of(saved(WEIGHTS))]))


needs_zip = pytest.mark.skipif(not shutil.which("zip"), reason="zip is not installed")
# By name of a file: what makes it, what the message calls it.
FOLLOWED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "model.onnx": (onnx_model, "ONNX model"),
    "by torch.onnx": (onnx_by_torch, "ONNX model"),
    "weights.h5": (hdf5, "HDF5 file, as Keras writes"),
    "behind its user's bytes.h5": (lambda path: hdf5(path, userblock_size=512), "HDF5 file"),
    "model.keras": (keras, "zip archive but not a checkpoint; it holds config.json, model.weights.h5"),
    "program.pt2": (program, "program by torch.export"),
    "package.pt": (package, "torch.package archive"),
    "a.npy": (lambda path: np.save(path, WEIGHTS["weight"].numpy()), "NumPy array"),
    "m.pt.gz": (packed_by("gzip -c"), "compressed (gzip)"),
    "it's a.pt": (packed_by("bzip2 -c"), "compressed (bzip2)"),
    "m.xz": (packed_by("xz -c"), "compressed (xz)"),
    "m.zst": (packed_by("zstd -c"), "compressed (zstd)"),
    "m.7z": (seven_zip, "7z archive"),
    "m.tar": (tar, "tar archive but not a checkpoint; it holds run 1/m.pt"),
    "m.tgz": (lambda path: tar(path, "w:gz"), "compressed (gzip)"),
    "old.pth.tar": (tar_of_torch_0_1, "tar format of torch 0.1"),
    "outer.zip": (outer_zip, "zip archive but not a checkpoint; it holds notes.txt, models/best one.pt"),
    "folder": (unpacked, "is an unpacked checkpoint"),
    "folder/m": (lambda path: unpacked(path.parent), "is an unpacked checkpoint"),
    "folder/m/data.pkl": (lambda path: unpacked(path.parents[1]), "is an unpacked checkpoint"),
    "other order.pt": (in_other_byte_order, "written on a machine with another byte order"),
    "compressed.pt": (zipped_again("m"), "another program has compressed"),
    "by a Mac.pt": (zipped_again(), "another program has compressed"),
    "without folder.pt": (zipped_again(folder="m"), "without its inner folder"),
    "of a folder.zip": (zipped_again("there", folder=".."), "zip archive but not a checkpoint"),
}


def follow(words: str, folder: Path) -> Path:
    """Do what a message advises, and return the file or folder that it names as the outcome."""
    if code := re.search(r"[Rr]un in Python: (.*)", words):
        exec(code[1], {})  # as a user would paste it
        return folder / ast.literal_eval(re.search(r"""(['"][^,]*-unpacked\.pt['"])\)$""", code[1])[1])  # type: ignore[index]
    if inside := re.search(r"^(.*) is a folder\. Use a file in it: (.*)\.$", words):
        return Path(inside[1], inside[2])
    command = re.search(r": ((cd|mkdir|python|gzip|bzip2|xz|zstd|7z) .*)$", words)[1]  # type: ignore[index]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, shell=True, cwd=folder, check=True, env={**os.environ, "PATH": path}, capture_output=True)
    named = (
        re.search(r"use (.*?): (mkdir|python|7z)", words)
        or re.search(r" > (.*)$", command)
        or re.search(r"zip -0 -r (.*)$", command)
    )
    entered = re.search(r"cd (.*) && zip", command)
    steps = [shlex.split(step)[0] for step in (entered[1] if entered else ".", named[1])]  # type: ignore[index]
    return folder.joinpath(*steps)


@needs_zip
@pytest.mark.parametrize("name", FOLLOWED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.follows(
    "visititems(lambda name, item:",
    "onnx.load('FILE')",
    "torch.from_numpy(numpy.load('FILE'))",
    "torch.export.load('FILE')",
    "load_pickle('PACKAGE', 'RESOURCE')",
    "torch.load('FILE', weights_only=False)",
    "torch.save(torch.load('FILE'), 'NEW.pt')",
    "gzip -dc",
    "bzip2 -dc",
    "xz -dc",
    "zstd -dc",
    "tar -xf",
    "7z x FILE",
    "Unpack it, and use NEW/INSIDE",
    "python -m zipfile -e FILE NEW",
    "zip -0 -r FOLDER.pt",
    "zip -0 -r NEW.pt",
    "zip -0 -r ZIPPED.pt",
)
def test_following_the_advice_leads_to_the_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, called = FOLLOWED[name]
    path = tmp_path / "given to me" / name
    path.parents[max(0, len(Path(name).parts) - 1)].mkdir()
    make(path)
    if path.with_suffix(".h5") != path:
        path.with_suffix(".h5").unlink(missing_ok=True)
    words = refused(path)
    assert called in words
    for _ in range(4):
        path = follow(words, tmp_path)
        try:
            load_weights(model := net(), path, strict=name != "a.npy")
        except BrokenCheckpointError as error:
            words = str(error)
            continue
        assert is_loaded(model) or (name == "a.npy" and torch.equal(model.weight, WEIGHTS["weight"]))
        return
    pytest.fail(words)


def lfs_clone(folder: Path, data: bytes) -> Path:
    """Return a file in a clone of a repository with Git LFS, before the file was fetched."""
    if not shutil.which("git-lfs"):
        pytest.skip("git-lfs is not installed")

    def git(where: Path, *arguments: str) -> None:
        environment = {**os.environ, "GIT_LFS_SKIP_SMUDGE": "1", "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(command, cwd=where, check=True, capture_output=True, env=environment)

    source = folder / "source"
    source.mkdir()
    git(source, "lfs", "install")
    git(source, "init")
    git(source, "lfs", "track", "*.pt")
    (source / "m.pt").write_bytes(data)
    git(source, "add", ".")
    git(source, "commit", "-m", "weights")
    git(folder, "clone", str(source), "clone")
    return folder / "clone" / "m.pt"


@pytest.mark.follows("git lfs pull")
def test_a_git_lfs_pointer_is_fetched_as_advised(tmp_path: Path) -> None:
    path = lfs_clone(tmp_path, saved(WEIGHTS))
    command = re.search(r"is a Git LFS pointer, .* with: (git lfs pull)$", refused(path))
    subprocess.run(command[1], shell=True, cwd=path.parent, check=True, env={**os.environ, "HOME": str(tmp_path)})  # type: ignore[index]
    load_weights(model := net(), path)
    assert is_loaded(model)


# -- what is only named --------------------------------------------------------------------------------------------

# Of tools that are too large to install here: their signatures, and names of files.
NAMED = {
    "model.tflite": (b"\x1c\0\0\0TFL3" + bytes(64), "is a TFLite model. Use the checkpoint that it was exported from"),
    "model.pte": (b"\x2c\0\0\0ET12" + bytes(64), "is an ExecuTorch program. Use the checkpoint"),
    "model.engine": (b"ftrt" + bytes(64), "is a TensorRT engine. Use the checkpoint"),
    "model.ggml": (b"lmgg" + bytes(64), "is a ggml file of llama.cpp. Use the model's original files"),
    "a.rar": (b"Rar!\x1a\x07\x01\0", "is a rar archive. Unpack it"),
    "saved_model.pb": (b"\x08\x01\x12\xa0\x1f" + bytes(64), "is a TensorFlow SavedModel. Read it with TensorFlow"),
    "model.ckpt.data-00000-of-00001": (b"\x9f\x01" * 40, "is a part of a TensorFlow checkpoint"),
    "zeros.ckpt": (bytes(4096), "begins with zeros instead of a checkpoint: 4.00 KiB"),
    "hf.bin": (b"Entry not found", 'is a text file, "Entry not found". .*download it again'),
    "cut in a letter.txt": (("ä" * 1000).encode(), "is a text file"),
    "page.pt": (b"\xef\xbb\xbf <HTML><body>Sign in", 'is a web page .*, "Sign in". Download the file itself'),
    "s3.ckpt": (b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code>', 'is a web page .*, "AccessDenied"'),
    "error.pt": (b'{"error":"Repository not found"}', 'is a JSON file, "{"error":"Repository not found"}"'),
    "list.pt": (b"[1, 2]", "is a JSON file"),
    "pip.ini": (b"[global]\n", "is a text file"),
    "escapes.txt": (b"\x1b[31mred", r"is not a checkpoint: 8 B that begin with b'\\x1b"),
}


@pytest.mark.parametrize("name", NAMED)
def test_other_files_are_named(name: str, tmp_path: Path) -> None:
    data, words = NAMED[name]
    (tmp_path / name).write_bytes(data)
    assert re.search(words, refused(tmp_path / name).removeprefix(f"{tmp_path / name} "))


def test_a_servers_error_page_is_named(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(HTTPError) as page:
            urlopen(f"http://127.0.0.1:{server.server_port}/gone.pt")
        (tmp_path / "gone.pt").write_bytes(page.value.read())
        server.shutdown()
    assert re.search(r"is a web page .*: the download returned .*, \".*404", refused(tmp_path / "gone.pt"))


@pytest.mark.parametrize("names", [("saved_model.pb",), ("m.ckpt.index", "m.ckpt.data-00000-of-00001", "checkpoint")])
def test_folders_by_tensorflow_are_named(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert "TensorFlow" in refused(tmp_path)
    if "checkpoint" in names:
        assert refused(tmp_path / "m.ckpt").startswith(f"{tmp_path}/m.ckpt is a TensorFlow checkpoint. Read it with")
        with pytest.raises(CheckpointNotFoundError):
            load_weights(net(), tmp_path / "n.ckpt")


# -- TorchScript ---------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()


SCRIPTS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "scripted": lambda model, path: torch.jit.script(model).save(path),
    "traced": lambda model, path: torch.jit.trace(model, torch.zeros(1, 3, 8, 8)).save(path),
    "for mobile devices": lambda model, path: torch.jit.script(model)._save_for_lite_interpreter(str(path)),
}


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_of_a_torchscript_program_are_loaded_without_its_code(kind: str, tmp_path: Path) -> None:
    path, source = tmp_path / "model.pt", network()
    SCRIPTS[kind](source, path)
    report = load_weights(model := network(), path)
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in model.state_dict().items())
    assert any("__torch__" in name for name in report.unread)
    assert read_structure(path).format == "TorchScript"
    verify_checkpoint(path)
    with pytest.raises(UnsafeCheckpointError) as caught:
        read_checkpoint(path)
    assert re.search(r"can run code when opened.*__torch__.*\n.*load only the weights", str(caught.value))
    assert "add_safe_globals" not in str(caught.value)
    load_weights(other := network(), path, weights_only=False)
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in other.state_dict().items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_damaged_code_of_a_torchscript_program_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.jit.script(network()).save(path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        code = next(entry for entry in archive.infolist() if entry.filename.endswith("container.py"))
    data[code.header_offset + 64 + len(code.filename) + 40] ^= 255
    path.write_bytes(data)
    load_weights(network(), path)
    with pytest.raises(BrokenCheckpointError, match=r"the checksum of the record code/.*container\.py is wrong"):
        verify_checkpoint(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_frozen_torchscript_program_has_no_weights_to_load(tmp_path: Path) -> None:
    torch.jit.freeze(torch.jit.script(network())).save(tmp_path / "frozen.pt")
    assert "without plain weights, as after torch.jit.freeze or quantization. Use the" in refused(
        tmp_path / "frozen.pt"
    )
    torch.jit.script(network())._save_for_lite_interpreter(str(tmp_path / "flat.ptl"), _use_flatbuffer=True)
    assert "is a TorchScript program for mobile devices. Use the" in refused(tmp_path / "flat.ptl")
