"""``checkpoint inspect | verify | convert`` as a user runs them, on contents of all kinds."""

import json
import os
import pkgutil
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import Tied, lightning_checkpoint, wrapped
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.reading import read_checkpoint
from lightning_gpu_tools.checkpoints.writing import write_checkpoint

PATH_CLASS = f"{type(Path()).__module__}.{type(Path()).__name__}"  # its module varies with Python's version
Run = Callable[..., tuple[int, str, str]]
WEIGHTS = nn.Linear(2, 2).state_dict()
LIGHTNING = {"pytorch-lightning_version": "2.6.6", "state_dict": WEIGHTS}


def test_inspect_shows_what_is_inside_also_as_json(last: str, run: Run) -> None:
    code, out, err = run("inspect", last)
    assert (code, err) == (0, "")
    assert "Lightning checkpoint" in " ".join(out.split())  # a long path may part the words
    assert "  saved from cpu\n" in out
    assert "  epoch: the value 3\n" in out
    assert "hyper_parameters: a dictionary with width" in out
    assert 'in the keys: "_orig_mod." (13), "module." (13)' in out
    assert "model.module._orig_mod.layers.{0…2}.weight" in out
    assert "192 B" in out
    assert max(map(len, out.splitlines())) <= max(100, len(last) + 40)
    summary = json.loads(run("inspect", last, "--json")[1])
    assert (summary["schema_version"], summary["devices"]) == (1, ["cpu"])
    assert summary["size_bytes"] == os.path.getsize(last)
    assert summary["entries"]["epoch"] == "the value 3"
    first = {"key": "model.module._orig_mod.layers.0.weight", "shape": [4, 4]}
    assert summary["weights"]["state_dict"][0] == {**first, "dtype": "float32", "numel": 16, "bytes": 64}


def test_unknown_sizes_are_null_in_json(tmp_path: Path, run: Run) -> None:
    torch.save({"kept": torch.eye(3).to_sparse(), "empty": torch.zeros(0, 4)}, tmp_path / "sparse.pt")
    sparse, empty = json.loads(run("inspect", str(tmp_path / "sparse.pt"), "--json")[1])["weights"][""]
    assert (sparse["numel"], sparse["bytes"]) == (None, None)
    assert (empty["numel"], empty["bytes"]) == (0, 0)


def test_what_cannot_be_read_exits_1_with_a_reason(tmp_path: Path, run: Run) -> None:
    (tmp_path / "web.ckpt").write_bytes(b"<html>")
    for action in ("inspect", "verify"):
        code, out, err = run(action, tmp_path / "web.ckpt")
        assert (code, out, "is a web page" in err) == (1, "", True)
        assert "Checkpoint file not found: " in run(action, tmp_path / "gone.ckpt")[2]


def test_verify_finds_a_flipped_bit(last: str, run: Run) -> None:
    code, out, _ = run("verify", last)
    assert (code, "all checksums match" in out) == (0, True)
    data = bytearray(Path(last).read_bytes())
    data[data.index(struct.pack("<4f", 1, 1, 1, 1))] ^= 1
    Path(last).write_bytes(data)
    code, out, err = run("verify", last)
    assert (code, out) == (1, "")
    assert re.search(r"checksum of the record data/\d+ is wrong", err)  # torch numbers them in its own way


def test_verify_says_what_it_did_not_open(tmp_path: Path, run: Run) -> None:
    path = str(tmp_path / "a.pt")
    torch.save({"model": WEIGHTS, "data": tmp_path}, path)
    code, out, _ = run("verify", path)
    assert (code, f"; not read, because opening would run code: {PATH_CLASS}" in out) == (0, True)
    assert load_weights(nn.Linear(2, 2), path).unread == (PATH_CLASS,)
    torch.save({"model": {**WEIGHTS, "net.bias": tmp_path}}, path)
    code, out, err = run("verify", path)
    assert (code, out) == (1, "")
    assert f"not plain tensors, so they cannot be loaded without opening it ({PATH_CLASS}): net.bias." in err


@pytest.mark.follows("load its weights with lightning_gpu_tools.load_weights", "or load its weights with ")
def test_weights_load_where_verify_says_that_nothing_else_does(tmp_path: Path, run: Run) -> None:
    torch.save({**LIGHTNING, "optimizer_states": {}}, path := str(tmp_path / "a.ckpt"))
    code, _, err = run("verify", path)
    words = r"a\.ckpt cannot be resumed: its optimizer_states is an empty dictionary, which no Trainer .* with (\S+)\.$"
    advised = re.search(words, err.rstrip())
    assert (code, bool(advised)) == (1, True)
    pkgutil.resolve_name(advised[1])(model := nn.Linear(2, 2), path)  # type: ignore[index]
    assert torch.equal(model.weight, WEIGHTS["weight"])


@pytest.mark.usefixtures("memory_files")
def test_every_action_takes_a_url(last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    url = "memory://b/a.safetensors"
    monkeypatch.chdir(tmp_path)
    assert run("convert", last, url)[0] == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    before = MemoryFileSystem.store["/b/a.safetensors"].getvalue()
    code, _, err = run("convert", last, url, "--add-root", "x")
    assert (code, f"{url} exists. Use --force to replace it" in err) == (1, True)
    assert MemoryFileSystem.store["/b/a.safetensors"].getvalue() == before
    assert run("inspect", url)[1].startswith(f"{url}: ")
    assert run("verify", url)[1].startswith(f"{url}: ")
    assert load_weights(Tied(), url).loaded == tuple(Tied().state_dict())
    assert "Checkpoint file not found: memory://b/gone" in run("inspect", "memory://b/gone")[2]


def test_an_unexpected_error_is_one_line_and_no_answer(
    last: str, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('a broken\\x1b installation')")
    path = f"{tmp_path}{os.pathsep}{os.getcwd()}"
    answer = run_python(
        *("-m", "lightning_gpu_tools", "checkpoint", "convert", last, str(tmp_path / "b.pt")), env={"PYTHONPATH": path}
    )
    assert (answer.returncode, answer.stdout) == (70, "")
    assert re.fullmatch(
        r"lightning-gpu-tools \S+ stopped on an unexpected error. Please report this line with the command: "
        r"RuntimeError: a broken\\x1b installation \(.*checkpoint.py:\d+ .*> __init__.py:1\)\n",
        answer.stderr,
    )


# convert: names, roots, wrappers, precision, formats; what it cannot do, it refuses


def test_convert_cleans_the_keys_and_keeps_the_rest(net: Tied, last: str, tmp_path: Path, run: Run) -> None:
    target = str(tmp_path / "clean.ckpt")
    _, out, _ = run("convert", last, target, "--drop-root", "model.module.", "--add-root", "model")
    assert '13 weights, removed "_orig_mod." from 13 keys, removed "module." from 13 keys' in out
    content = torch.load(target)
    assert list(content["state_dict"]) == [f"model.{key}" for key in net.state_dict()]
    assert content["epoch"] == 3
    assert content["optimizer_states"][0]["state"][0]["exp_avg"].tolist() == [1] * 4
    assert content["state_dict"]._metadata["model.norm"] == {"version": 2}


def test_tensors_of_any_size_and_type_go_through_safetensors(tmp_path: Path, run: Run) -> None:
    from safetensors.torch import load_file

    kinds = (torch.float32, torch.bool, torch.bfloat16, torch.int64, torch.float8_e5m2, torch.complex64, torch.uint16)
    shapes = [(3, 5), (), (0, 2), (1 << 19,), (7,)]
    weights = {f"{kind}.{i}": torch.randn(s).to(kind) for i, s in enumerate(shapes) for kind in kinds}
    weights["turned"] = torch.randn(4, 3).T
    torch.save(weights, tmp_path / "a.pt")
    assert run("convert", str(tmp_path / "a.pt"), str(tmp_path / "a.safetensors"))[0] == 0
    for loaded in (load_file(tmp_path / "a.safetensors"), read_checkpoint(tmp_path / "a.safetensors")):
        assert loaded.keys() == weights.keys()
        for key, value in weights.items():
            assert (loaded[key].shape, loaded[key].dtype) == (value.shape, value.dtype), key
            mine, theirs = (tensor.reshape(-1).view(torch.uint8) for tensor in (loaded[key], value))
            assert torch.equal(mine, theirs), key


@pytest.mark.follows("Use --force to replace it")
def test_convert_replaces_a_file_only_on_request(last: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "there.ckpt").write_text("mine")
    code, out, err = run("convert", last, tmp_path / "there.ckpt")
    assert (code, out, (tmp_path / "there.ckpt").read_text()) == (1, "", "mine")
    advised = re.search(r"exists\. Use (\S+) to replace it", err)
    assert run("convert", last, tmp_path / "there.ckpt", advised[1])[0] == 0  # type: ignore[index]
    assert torch.load(tmp_path / "there.ckpt")["epoch"] == 3


def test_convert_renames_all_that_goes_by_the_models_names(net: Tied, tmp_path: Path, run: Run) -> None:
    raw, average = wrapped(net), wrapped(Tied())
    name = "model.module._orig_mod.norm.bias"
    optimizer = {"state": {name: {"step": 1}}, "param_groups": [{"params": [name]}]}
    content = lightning_checkpoint(average, current_model_state=raw, optimizer_states=[optimizer])
    write_checkpoint(content, tmp_path / "ema.ckpt")
    source, target = str(tmp_path / "ema.ckpt"), str(tmp_path / "a.ckpt")
    names = ("--drop-root", "model.module.", "--add-root", "model")
    for entry in ((), ("--entry", "current_model_state")):
        assert run("convert", source, target, *names, "--force", *entry)[0] == 0
        stored = torch.load(target)
        for state, expected in (("current_model_state", raw), ("state_dict", average)):
            assert list(stored[state]) == [f"model.{key}" for key in net.state_dict()]
            values = zip(stored[state].values(), expected.values(), strict=True)
            assert all(torch.equal(a, b) for a, b in values)
        assert stored["optimizer_states"][0]["param_groups"][0]["params"] == ["model.norm.bias"]
        assert list(stored["optimizer_states"][0]["state"]) == ["model.norm.bias"]
    tensors = str(tmp_path / "raw.pt")
    assert run("convert", source, tensors, "--weights", "--entry", "current_model_state")[0] == 0
    assert torch.equal(torch.load(tensors)["model.module.norm.bias"], raw[name])


def test_converted_weights_stay_tied_and_take_nothing_along(tmp_path: Path, run: Run) -> None:
    big = torch.randn(100_000)
    torch.save({"model.e": big, "model.h": big, "model.part": big[:10]}, tmp_path / "a.pt")
    for suffix in ("pt", "safetensors"):
        target = tmp_path / f"tied.{suffix}"
        assert run("convert", str(tmp_path / "a.pt"), str(target))[0] == 0
        assert 400_000 < target.stat().st_size < 405_000
    tied = torch.load(tmp_path / "tied.pt")
    assert tied["model.e"].data_ptr() == tied["model.h"].data_ptr()
    torch.save({"model.part": big[:10], "rest": big}, tmp_path / "b.pt")
    run("convert", str(tmp_path / "b.pt"), str(tmp_path / "part.pt"), "--drop-root", "model")
    assert torch.equal(torch.load(tmp_path / "part.pt")["part"], big[:10])
    assert (tmp_path / "part.pt").stat().st_size < 5000


@pytest.mark.parametrize("entry", [None, "model"])
def test_the_target_loads_into_the_bare_model(entry: str | None, tmp_path: Path, run: Run) -> None:
    weights: Any = AveragedModel(nn.DataParallel(nn.BatchNorm1d(2))).state_dict()
    torch.save({entry: weights, "epoch": 1} if entry else weights, tmp_path / "a.pt")
    code, said, _ = run("convert", tmp_path / "a.pt", tmp_path / "b.pt")
    assert (code, "dropped: n_averaged" in said) == (0, True)
    content = torch.load(tmp_path / "b.pt")
    nn.BatchNorm1d(2).load_state_dict(content[entry] if entry else content)


def test_a_module_that_a_trainer_saved_is_an_attribute(tmp_path: Path, run: Run) -> None:
    weights = {f"module.{key}": value for key, value in WEIGHTS.items()}
    torch.save({**LIGHTNING, "state_dict": weights}, tmp_path / "a.ckpt")
    assert run("convert", tmp_path / "a.ckpt", tmp_path / "b.ckpt")[0] == 0
    assert [*torch.load(tmp_path / "b.ckpt")["state_dict"]] == [*weights]
