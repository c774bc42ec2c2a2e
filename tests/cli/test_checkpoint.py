"""``checkpoint inspect | verify`` as a user runs them, on contents of all kinds; exit codes, URLs, progress."""

import argparse
import json
import os
import pkgutil
import re
import shlex
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import Tied, lightning_checkpoint
from fsspec.implementations.memory import MemoryFileSystem
from lightning.fabric.utilities.data import AttributeDict
from torch import nn

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.reading import read_checkpoint
from lightning_gpu_tools.checkpoints.writing import write_checkpoint
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import CheckpointMismatchError

PATH_CLASS = f"{type(Path()).__module__}.{type(Path()).__name__}"  # its module varies with Python's version
Run = Callable[..., tuple[int, str, str]]


def test_inspect_shows_what_is_inside(last: str, run: Run) -> None:
    code, out, err = run("inspect", last)
    assert (code, err) == (0, "")
    assert "Lightning checkpoint" in " ".join(out.split())  # a long path may part the words
    assert "epoch 3, step 812, Lightning 2.6.6, saved from cpu, optimizers 1" in out
    assert "hyperparameters: width" in out
    assert 'in the keys: "_orig_mod." (13), "module." (13)' in out
    assert "model.module._orig_mod.layers.{0…2}.weight" in out
    assert "192 B" in out
    assert max(map(len, out.splitlines())) <= max(100, len(last) + 40)
    assert "model.module._orig_mod.layers.2.bias" in run("inspect", last, "--all")[1]


def test_inspect_gives_json(last: str, run: Run) -> None:
    summary = json.loads(run("inspect", last, "--json")[1])
    assert summary["schema_version"] == 1
    assert summary["kind"] == "lightning"
    assert summary["devices"] == ["cpu"]
    assert summary["size_bytes"] == os.path.getsize(last)
    assert summary["wrappers_in_keys"] == {"state_dict": {"_orig_mod": 13, "module": 13}}
    first = summary["weights"]["state_dict"][0]
    assert first == {
        "key": "model.module._orig_mod.layers.0.weight",
        "shape": [4, 4],
        "dtype": "float32",
        "kind": None,
        "numel": 16,
        "bytes": 64,
        "device": "cpu",
    }
    assert summary["torch_version"] is None


@pytest.mark.follows("more entries; use --json to list all")
def test_inspect_lists_all_entries_as_json(tmp_path: Path, run: Run) -> None:
    torch.save({**LIGHTNING, **{f"more{i}": i for i in range(30)}}, path := str(tmp_path / "a.ckpt"))
    advised = re.search(r"and 10 more entries; use (\S+) to list all", run("inspect", path)[1])
    entries = json.loads(run("inspect", path, advised[1])[1])["entries"]  # type: ignore[index]
    assert {f"more{i}" for i in range(30)} <= entries.keys()


def test_inspect_knows_the_manifest_and_foreign_classes(net: Tied, tmp_path: Path, run: Run) -> None:
    manifest = {"version": 1, "wrappers": {"net": "DataParallel"}, "torch": "2.13.0", "devices": ["cuda:7"]}
    path = tmp_path / "a.ckpt"
    write_checkpoint(lightning_checkpoint(net.state_dict(), lightning_gpu_tools=manifest, where=tmp_path), path)
    out = run("inspect", str(path))[1]
    assert "saved from cuda:7" in out
    assert "wrappers removed on save: DataParallel at net" in out
    assert f"holds more than plain data: {PATH_CLASS}" in out


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


def test_verify_says_where_there_are_no_checksums(net: Tied, tmp_path: Path, run: Run) -> None:
    torch.save(net.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    code, out, _ = run("verify", str(tmp_path / "old.pt"))
    assert code == 0
    assert "no checksums" in out


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


def test_verify_refuses_what_holds_no_weights(tmp_path: Path, run: Run) -> None:
    torch.save(torch.optim.SGD([torch.ones(2)]).state_dict(), tmp_path / "a.pt")
    code, out, err = run("verify", str(tmp_path / "a.pt"))
    assert (code, out) == (1, "")
    assert "holds no weights, only the state of an optimizer" in err


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
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_every_action_takes_a_url(
    name: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    url = f"memory://b/{name}"
    monkeypatch.chdir(tmp_path)
    assert run("convert", last, url)[0] == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    before = MemoryFileSystem.store[f"/b/{name}"].getvalue()
    code, _, err = run("convert", last, url, "--add-root", "x")
    assert (code, f"{url} exists. Use --force to replace it" in err) == (1, True)
    assert MemoryFileSystem.store[f"/b/{name}"].getvalue() == before
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


@pytest.mark.parametrize("action", ["inspect", "verify", "convert"])
def test_help_documents_the_exit_codes(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", action, "--help"])
    assert caught.value.code == 0
    assert "Exit code: 0" in " ".join(capsys.readouterr().out.split())


WEIGHTS = nn.Linear(2, 2).state_dict()
LIGHTNING = {"pytorch-lightning_version": "2.6.6", "state_dict": WEIGHTS}


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch 2.8 added them")
def test_numbers_of_four_bits_are_kept_in_every_format(tmp_path: Path, run: Run) -> None:
    from safetensors.torch import load_file, save_file

    packed = torch.arange(24, dtype=torch.uint8).reshape(4, 6).view(torch.float4_e2m1fn_x2)
    paths = {suffix: str(tmp_path / f"a.{suffix}") for suffix in ("pt", "safetensors")}
    torch.save({"w": packed}, paths["pt"])
    assert run("convert", paths["pt"], paths["safetensors"])[0] == 0
    save_file({"w": packed}, tmp_path / "theirs.safetensors")
    for weights in (load_file(paths["safetensors"]), read_checkpoint(tmp_path / "theirs.safetensors")):
        assert weights["w"].dtype is packed.dtype
        assert torch.equal(weights["w"].view(torch.uint8), packed.view(torch.uint8))
    for path in (paths["pt"], str(tmp_path / "theirs.safetensors")):
        assert json.loads(run("inspect", path, "--json")[1])["weights"][""][0]["bytes"] == 24
    code, _, err = run("convert", paths["pt"], str(tmp_path / "b.pt"), "--dtype", "bfloat16")
    assert (code, "Torch cannot convert w from torch.float4_e2m1fn_x2" in err) == (1, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.ones(2), 1], "a list of 2, first a tensor (2, float32)"),
        (torch.ones(2, 3), "a tensor (2x3, float32)"),
        (nn.Linear(2, 2), "a module of torch.nn.modules.linear.Linear"),
        (torch.optim.SGD([torch.ones(2)]), "an optimizer of torch.optim.sgd.SGD"),
        (torch.optim.SGD([torch.ones(2)]).state_dict(), "the state of an optimizer"),
        (nn.Linear, "the class or function torch.nn.modules.linear.Linear"),
        (Path("a"), f"an object of {PATH_CLASS}"),
        ("text", 'the text "text"'),
        ([], "an empty list"),
        ([1, 2], "a list of 2, first the value 1"),
        (7, "the value 7"),
    ],
)
def test_inspect_says_what_is_no_dictionary(content: object, words: str, tmp_path: Path, run: Run) -> None:
    torch.save(content, tmp_path / "a.pt")
    assert words in " ".join(run("inspect", str(tmp_path / "a.pt"))[1].split())
    code, _, err = run("convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--weights")
    if isinstance(content, nn.Module):
        assert code == 0
    else:
        assert re.search(rf"holds no weights( that can be loaded without opening it)?, only {re.escape(words)}\.", err)


def test_weights_without_numbers_are_shown_and_refused(tmp_path: Path, run: Run) -> None:
    path, target = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    torch.save({**WEIGHTS, "bias": WEIGHTS["bias"].to("meta"), "mask": torch.eye(3).to_sparse()}, path)
    shown = [line.split() for line in run("inspect", path)[1].splitlines()]
    assert [*shown[-3:]] == [
        ["weight", "2x2", "float32", "16", "B"],
        ["bias", "2", "float32", "(meta)", "-"],
        ["mask", "-", "?", "(sparse)", "-"],
    ]
    answer = run("convert", path, target)
    assert answer[:2] == (1, "")
    assert "has no numbers for bias: it was saved from the meta device" in answer[2]


class Halves(torch.Tensor):
    """Keeps its numbers in two other tensors and refuses all operations, like many of torchao's."""

    @staticmethod
    def __new__(cls, low: torch.Tensor, high: torch.Tensor) -> "Halves":
        made: Halves = torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=torch.float32)
        made.low, made.high = low, high
        return made

    __init__ = object.__init__
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __tensor_flatten__(self) -> Any:
        return ["low", "high"], {"scale": 3}

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> "Halves":
        return Halves(**parts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].low, args[0].high)
        raise NotImplementedError(func)


def test_packed_weights_are_kept_or_refused(tmp_path: Path, run: Run) -> None:
    numbers = torch.arange(4.0).reshape(2, 2)
    one, two = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    halves = {name: Halves(numbers + i, numbers) for i, name in enumerate(("weight", "other"))}
    torch.save({**halves, "bias": numbers[0]}, one)
    assert "weight 2x2 float32 (Halves) -" in " ".join(run("inspect", one)[1].split())
    with torch.serialization.safe_globals([Halves]):
        assert run("convert", one, two)[:2] == (0, f"{two}: 3 weights\n")
        kept = torch.load(two)
        assert all(torch.equal(kept[name].low, packed.low) for name, packed in halves.items())
        target = str(tmp_path / "a.safetensors")
        assert "safetensors cannot store weight, other" in run("convert", one, target)[2]
        assert "Torch cannot convert weight" in run("convert", one, two, "--dtype", "float16", "--force")[2]
        model = nn.Linear(2, 2)
        with pytest.raises(CheckpointMismatchError, match="a tensor of the class Halves instead of a strided tensor"):
            load_weights(model, one, strict=False)


class Node:
    """Stands for OmegaConf's DictConfig, which holds its values in ``_content``."""

    def __init__(self, **content: Any) -> None:
        self._content = content


def test_inspect_lists_entries_and_hyperparameters_of_any_class(tmp_path: Path, run: Run) -> None:
    path = str(tmp_path / "a.ckpt")
    content = {**LIGHTNING, "seed": 7, "model_ema": WEIGHTS, "rest": [1], "where": tmp_path}
    for hyperparameters in (Node(width=4), argparse.Namespace(width=4), AttributeDict(width=4)):
        torch.save({**content, "hyper_parameters": hyperparameters}, path)
        lines = run("inspect", path)[1].splitlines()
        assert "  hyperparameters: width" in lines
    assert "  seed: the value 7" in lines
    assert "  rest: a list of 1, first the value 1" in lines
    assert f"  where: an object of {PATH_CLASS}" in lines
    assert [line.partition(":")[0] for line in lines if " keys, " in line] == ["state_dict", "model_ema"]
    summary = json.loads(run("inspect", path, "--json")[1])
    assert summary["entries"]["state_dict"].startswith("a dictionary with weight, bias")


def test_weights_beside_classes_are_converted(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = str(tmp_path / "a b.pt"), str(tmp_path / "b.pt")
    torch.save({"model": WEIGHTS, "hparams": {"data": tmp_path}}, path)
    code, _, err = run("convert", path, target)
    assert (code, os.path.exists(target)) == (1, False)
    monkeypatch.chdir(tmp_path)
    target, command = "weights.pt", err.rpartition("or: lightning-gpu-tools checkpoint ")[2]
    assert run(*shlex.split(command))[1:] == (
        f"{target}: 2 weights, not read, because opening would run code: {PATH_CLASS}\n",
        "",
    )
    assert torch.load(target).keys() == WEIGHTS.keys()


def test_tensors_of_any_make_are_converted_or_refused(tmp_path: Path, run: Run) -> None:
    path, copy, target = (str(tmp_path / name) for name in ("a.pt", "b.pt", "a.safetensors"))
    conjugate = torch.tensor([1 + 2j]).conj()
    torch.save({"sparse": torch.eye(3).to_sparse(), "conjugate": conjugate}, path)
    assert run("convert", path, copy)[0] == 0
    kept = torch.load(copy)
    assert (kept["sparse"].to_dense().tolist(), kept["conjugate"].tolist()) == (torch.eye(3).tolist(), [1 - 2j])
    torch.save({"a": conjugate, "b": conjugate.conj()}, path)
    assert run("convert", path, target)[0] == 0
    assert {key: value.tolist() for key, value in read_checkpoint(target).items()} == {"a": [1 - 2j], "b": [1 + 2j]}
    torch.save({"nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, path)
    code, _, errors = run("convert", path, copy, "--force")
    assert code == 0 or "add_safe_globals([torch._utils._rebuild_nested_tensor])" in errors  # from torch 2.15 on
    with torch.serialization.safe_globals([torch._utils._rebuild_nested_tensor]):
        assert run("convert", path, copy, "--force")[0] == 0
        assert "safetensors cannot store nested" in run("convert", path, target, "--force")[2]
