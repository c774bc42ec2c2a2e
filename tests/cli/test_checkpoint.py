"""``checkpoint inspect | verify`` as a user runs them, on contents of all kinds; exit codes, URLs, progress."""

import json
import os
import pkgutil
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_files import Tied
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from lightning_gpu_tools import load_weights

PATH_CLASS = f"{type(Path()).__module__}.{type(Path()).__name__}"  # its module varies with Python's version
Run = Callable[..., tuple[int, str, str]]


def test_inspect_shows_what_is_inside(last: str, run: Run) -> None:
    code, out, err = run("inspect", last)
    assert (code, err) == (0, "")
    assert "Lightning checkpoint" in " ".join(out.split())  # a long path may part the words
    assert "epoch 3, step 812, Lightning 2.6.6, saved from cpu" in out
    assert "hyper_parameters: a dictionary with width" in out
    assert 'in the keys: "_orig_mod." (13), "module." (13)' in out
    assert "model.module._orig_mod.layers.{0…2}.weight" in out
    assert "192 B" in out
    assert max(map(len, out.splitlines())) <= max(100, len(last) + 40)


def test_inspect_gives_json(last: str, run: Run) -> None:
    summary = json.loads(run("inspect", last, "--json")[1])
    assert summary["schema_version"] == 1
    assert summary["kind"] == "lightning"
    assert summary["devices"] == ["cpu"]
    assert summary["size_bytes"] == os.path.getsize(last)
    assert summary["wrappers_in_keys"] == {"state_dict": {"_orig_mod": 13, "module": 13}}
    first = summary["weights"]["state_dict"][0]
    assert (first["key"], first["shape"]) == ("model.module._orig_mod.layers.0.weight", [4, 4])
    assert (first["dtype"], first["bytes"], first["device"]) == ("float32", 64, "cpu")


def test_what_cannot_be_read_exits_1_with_a_reason(tmp_path: Path, run: Run) -> None:
    (tmp_path / "web.ckpt").write_bytes(b"<html>")
    for action in ("inspect", "verify"):
        code, out, err = run(action, str(tmp_path / "web.ckpt"))
        assert (code, out) == (1, "")
        assert "is a web page" in err
        assert "Checkpoint file not found: " in run(action, str(tmp_path / "gone.ckpt"))[2]


def test_verify_finds_a_flipped_bit(last: str, run: Run) -> None:
    code, out, _ = run("verify", last)
    assert code == 0
    assert "all checksums match" in out
    assert json.loads(run("verify", last, "--json")[1])["checksums"] is True
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
    assert json.loads(run("verify", path, "--json")[1])["unread"] == [PATH_CLASS]
    assert load_weights(nn.Linear(2, 2), path).unread == (PATH_CLASS,)
    torch.save({"model": {**WEIGHTS, "bias": tmp_path}}, path)
    code, out, err = run("verify", path)
    assert (code, out) == (1, "")
    assert "has weights that were not opened, because this would run code: bias. Ask its author" in err


@pytest.mark.follows("load its weights with lightning_gpu_tools.load_weights")
def test_weights_load_where_verify_says_that_nothing_else_does(tmp_path: Path, run: Run) -> None:
    torch.save({**LIGHTNING, "optimizer_states": {}}, path := str(tmp_path / "a.ckpt"))
    code, _, err = run("verify", path)
    words = r"a\.ckpt cannot be resumed: its optimizer_states is an empty dictionary, not a list .* with (\S+)\.$"
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
    assert json.loads(run("verify", url, "--json")[1])["path"] == url
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


WEIGHTS = nn.Linear(2, 2).state_dict()
LIGHTNING = {"pytorch-lightning_version": "2.6.6", "state_dict": WEIGHTS}
