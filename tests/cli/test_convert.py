"""``checkpoint convert``: names, roots, wrappers, precision, formats; what it cannot do, it refuses."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import Tied, lightning_checkpoint, wrapped
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_gpu_tools.checkpoints.reading import read_checkpoint
from lightning_gpu_tools.checkpoints.writing import write_checkpoint
from lightning_gpu_tools.cli import main

Run = Callable[..., tuple[int, str, str]]


def test_convert_cleans_the_keys_and_keeps_the_rest(net: Tied, last: str, tmp_path: Path, run: Run) -> None:
    target = str(tmp_path / "clean.ckpt")
    code, out, _ = run("convert", last, target, "--drop-root", "model.module.", "--add-root", "model")
    assert code == 0
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
def test_convert_refuses_what_it_cannot_do(net: Tied, last: str, tmp_path: Path, run: Run) -> None:
    Path(tmp_path / "there.ckpt").write_text("mine")
    for arguments, words in (
        ((last, str(tmp_path / "there.ckpt")), "exists. Use --force to replace it"),
        ((last, str(tmp_path / "a.ckpt"), "--drop-root", "net"), "no key begins with 'net.'"),
        ((last, str(tmp_path / "a.ckpt"), "--entry", "ema"), "no weights called 'ema'; it has state_dict"),
        ((str(tmp_path / "gone.ckpt"), str(tmp_path / "a.ckpt")), "Checkpoint file not found: "),
    ):
        code, out, err = run("convert", *arguments)
        assert (code, out) == (1, "")
        assert words in err
    assert Path(tmp_path / "there.ckpt").read_text() == "mine"
    advised = re.search(r"exists\. Use (\S+) to replace it", run("convert", last, tmp_path / "there.ckpt")[2])
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
        assert run("convert", source, target, *names, "--force", "--dtype", "bfloat16", *entry)[0] == 0
        stored = torch.load(target)
        for state, expected in (("current_model_state", raw), ("state_dict", average)):
            assert list(stored[state]) == [f"model.{key}" for key in net.state_dict()]
            values = zip(stored[state].values(), expected.values(), strict=True)
            assert all(torch.equal(a, b.to(a.dtype)) for a, b in values)
        assert stored["optimizer_states"][0]["param_groups"][0]["params"] == ["model.norm.bias"]
        assert list(stored["optimizer_states"][0]["state"]) == ["model.norm.bias"]
    tensors = str(tmp_path / "raw.pt")
    assert run("convert", source, tensors, "--weights", "--entry", "current_model_state")[0] == 0
    assert torch.equal(torch.load(tensors)["model.module.norm.bias"], raw[name])


def test_converted_weights_stay_tied_and_take_nothing_along(tmp_path: Path, run: Run) -> None:
    big = torch.randn(100_000)
    torch.save({"model.e": big, "model.h": big, "model.part": big[:10]}, tmp_path / "a.pt")
    for suffix in ("pt", "safetensors"):
        target = tmp_path / f"half.{suffix}"
        assert run("convert", str(tmp_path / "a.pt"), str(target), "--dtype", "float16")[0] == 0
        assert 200_000 < target.stat().st_size < 205_000
    half = torch.load(tmp_path / "half.pt")
    assert half["model.e"].data_ptr() == half["model.h"].data_ptr()
    torch.save({"model.part": big[:10], "rest": big}, tmp_path / "b.pt")
    run("convert", str(tmp_path / "b.pt"), str(tmp_path / "part.pt"), "--drop-root", "model")
    assert torch.equal(torch.load(tmp_path / "part.pt")["part"], big[:10])
    assert (tmp_path / "part.pt").stat().st_size < 5000


def bare_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


BARE = [*bare_net().state_dict()]
WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "DataParallel": lambda: nn.DataParallel(bare_net()),
    "averaged": lambda: AveragedModel(nn.DataParallel(bare_net())),
}


@pytest.mark.parametrize("entry", [None, "model"])
@pytest.mark.parametrize("wrapping", WRAPPED)
def test_the_target_loads_into_the_bare_model(
    wrapping: str, entry: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights: Any = WRAPPED[wrapping]().state_dict()
    source, target = str(tmp_path / "a.pt"), tmp_path / "b.pt"
    torch.save({entry: weights, "epoch": 1} if entry else weights, source)
    assert main(["checkpoint", "convert", source, str(target)]) == 0
    said = capsys.readouterr().out
    assert f'{len(BARE)} weights, removed "' in said
    assert ("dropped: n_averaged" in said) == (wrapping == "averaged")
    content = torch.load(target)
    bare_net().load_state_dict(content[entry] if entry else content)
    assert main(["checkpoint", "convert", source, str(target), "--force", "--keep-prefix"]) == 0
    content = torch.load(target)
    assert all(key.startswith("module.") or key == "n_averaged" for key in (content[entry] if entry else content))


def test_a_module_that_a_trainer_saved_is_an_attribute(tmp_path: Path) -> None:
    weights = nn.ModuleDict({"module": bare_net()}).state_dict()
    torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": weights}, tmp_path / "a.ckpt")
    assert main(["checkpoint", "convert", str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]) == 0
    assert [*torch.load(tmp_path / "b.ckpt")["state_dict"]] == [*weights]
