"""What ``checkpoint`` says of contents and numbers of all kinds."""

import argparse
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch import nn

from lightning_gpu_tools import CheckpointMismatchError, load_weights
from lightning_gpu_tools.checkpoints.torch_files import read_checkpoint

Run = Callable[..., tuple[int, str, str]]
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
    torch.save({"w": (packed.view(torch.uint8) + 1).view(packed.dtype)}, tmp_path / "c.pt")
    code, out, _ = run("diff", paths["pt"], str(tmp_path / "c.pt"))
    assert (code, "different bits" in out) == (1, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.ones(2), 1], "a list of 2, first a tensor (2, float32)"),
        (torch.ones(2, 3), "a tensor (2x3, float32)"),
        (nn.Linear(2, 2), "a module of the class torch.nn.modules.linear.Linear"),
        (torch.optim.SGD([torch.ones(2)]), "an optimizer of the class torch.optim.sgd.SGD"),
        (torch.optim.SGD([torch.ones(2)]).state_dict(), "the state of an optimizer"),
        (nn.Linear, "the class or function torch.nn.modules.linear.Linear"),
        (Path("a"), "an object of the class pathlib.PosixPath"),
        ("text", 'the text "text"'),
    ],
)
def test_inspect_says_what_is_no_dictionary(content: object, words: str, tmp_path: Path, run: Run) -> None:
    torch.save(content, tmp_path / "a.pt")
    assert words in " ".join(run("inspect", str(tmp_path / "a.pt"))[1].split())
    code, _, err = run("diff", str(tmp_path / "a.pt"), str(tmp_path / "a.pt"))
    assert code == 0 if isinstance(content, nn.Module) else f"holds no weights but {words}." in err


def test_weights_without_numbers_are_shown_and_refused(tmp_path: Path, run: Run) -> None:
    path, target = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    torch.save({**WEIGHTS, "bias": WEIGHTS["bias"].to("meta"), "mask": torch.eye(3).to_sparse()}, path)
    shown = [line.split() for line in run("inspect", path)[1].splitlines()]
    assert [*shown[-3:]] == [
        ["weight", "2x2", "float32", "16", "B"],
        ["bias", "2", "float32", "(meta)", "-"],
        ["mask", "3x3", "float32", "(sparse)", "-"],
    ]
    for arguments, code in ((("convert", path, target), 1), (("diff", path, path), 3)):
        answer = run(*arguments)
        assert answer[:2] == (code, "")
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


def test_packed_weights_are_kept_compared_or_refused(tmp_path: Path, run: Run) -> None:
    numbers = torch.arange(4.0).reshape(2, 2)
    paths = [tmp_path / f"{name}.pt" for name in "abc"]
    for path, high in zip(paths, (numbers, numbers + 1), strict=False):
        torch.save({"weight": Halves(numbers, high), "other": Halves(numbers + 5, high), "bias": numbers[0]}, path)
    one, two, three = map(str, paths)
    assert "weight 2x2 float32 (Halves) -" in " ".join(run("inspect", one)[1].split())
    with torch.serialization.safe_globals([Halves]):
        assert run("convert", one, three)[:2] == (0, f"{three}: 3 weights\n")
        assert [run("diff", one, other)[0] for other in (one, two, three)] == [0, 1, 0]
        target = str(tmp_path / "a.safetensors")
        assert "holds plain tensors only, not weight, other" in run("convert", one, target)[2]
        assert "Torch cannot convert weight" in run("convert", one, three, "--dtype", "float16", "--force")[2]
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
    assert "  where: an object of the class pathlib.PosixPath" in lines
    assert [line.partition(":")[0] for line in lines if " keys, " in line] == ["state_dict", "model_ema"]
    summary = json.loads(run("inspect", path, "--json")[1])
    assert summary["entries"]["state_dict"].startswith("a dictionary with weight, bias")


def test_weights_beside_classes_are_converted_and_compared(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = str(tmp_path / "a b.pt"), str(tmp_path / "b.pt")
    torch.save({"model": WEIGHTS, "hparams": {"data": tmp_path}}, path)
    code, _, err = run("convert", path, target)
    assert (code, os.path.exists(target)) == (1, False)
    monkeypatch.chdir(tmp_path)
    target, command = "weights.pt", err.rpartition("or: lightning-gpu-tools checkpoint ")[2]
    assert run(*shlex.split(command))[1:] == (
        f"{target}: 2 weights, left unread, as it takes code to open: pathlib.PosixPath\n",
        "",
    )
    assert torch.load(target).keys() == WEIGHTS.keys()
    assert run("diff", path, target)[:2] == (0, f"{path} and {target}: 2 weights are the same\n")
