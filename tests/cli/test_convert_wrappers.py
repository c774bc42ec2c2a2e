"""``checkpoint convert`` takes off the ``module.`` of wrappers, where it is one, and says so."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel
from wrapped_models import compiled

from lightning_gpu_tools.checkpoints.rename_plan import clean_names
from lightning_gpu_tools.cli import main


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def with_wrapper_inside() -> nn.Module:
    return nn.ModuleDict({"body": nn.DataParallel(net()), "head": nn.Linear(2, 1)})


BARE = [*net().state_dict()]
WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "DataParallel": lambda: nn.DataParallel(net()),
    "compiled": lambda: nn.DataParallel(compiled(net())),
    "twice": lambda: nn.DataParallel(nn.DataParallel(net())),
    "averaged": lambda: AveragedModel(nn.DataParallel(net())),
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
    assert ("left out: n_averaged" in said) == (wrapping == "averaged")
    content = torch.load(target)
    net().load_state_dict(content[entry] if entry else content)
    assert main(["checkpoint", "convert", source, str(target), "--force", "--keep-prefix"]) == 0
    content = torch.load(target)
    assert all(key.startswith("module.") or key == "n_averaged" for key in (content[entry] if entry else content))


def test_a_module_that_a_trainer_saved_is_an_attribute(tmp_path: Path) -> None:
    weights = nn.ModuleDict({"module": net()}).state_dict()
    torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": weights}, tmp_path / "a.ckpt")
    assert main(["checkpoint", "convert", str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]) == 0
    assert [*torch.load(tmp_path / "b.ckpt")["state_dict"]] == [*weights]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["b.pt", "--wrapper", "WRONG"], 1, "'WRONG' is no wrapper. No key begins with 'WRONG.module.'"),
        (["b.pt", "--wrapper", "head"], 1, "That name is at: 'body'."),
        (["b.pt", "--wrapper", "body", "--wrapper", ""], 1, "'' is no wrapper. No key begins with 'module.'"),
        (["b.onnx"], 2, "b.onnx must end in .ckpt, .pt, .pth, .bin, .safetensors"),
        (["b"], 2, "b must end in .ckpt"),
    ],
)
def test_wrong_wrappers_and_endings_are_errors(
    options: list[str], code: int, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save(with_wrapper_inside().state_dict(), tmp_path / "a.pt")
    target, *rest = options
    command = ["checkpoint", "convert", str(tmp_path / "a.pt"), str(tmp_path / target), *rest]
    try:
        ended = main(command)
    except SystemExit as exit_:
        ended = exit_.code  # type: ignore[assignment]
    assert (ended, words in " ".join(capfd.readouterr().err.split())) == (code, True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_wrapper_inside_goes_where_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(with_wrapper_inside().state_dict(), tmp_path / "a.pt")
    command = ["checkpoint", "convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--force"]
    assert main(command) == 0
    assert "body.module.0.weight" in torch.load(tmp_path / "b.pt")
    assert main([*command, "--wrapper", "body"]) == 0
    assert f'removed "module." from {len(BARE)} keys' in capsys.readouterr().out
    assert [*torch.load(tmp_path / "b.pt")][:2] == ["body.0.weight", "body.0.bias"]


segments = st.sampled_from(["module", "net", "0", "w"])
keys = st.lists(st.lists(segments, min_size=1, max_size=4).map(".".join), min_size=1, max_size=5, unique=True)


@given(keys=keys)
def test_only_what_all_keys_begin_with_is_taken_off(keys: list[str]) -> None:
    names: Mapping[str, str] = clean_names(keys, around_all=True)
    assert len({*names.values()}) == len(keys) == len(names)
    taken = {key.removesuffix(name) for key, name in names.items()}
    assert len(taken) == 1
    assert {*taken.pop().split(".")} <= {"module", ""}
    assert not all(name.startswith("module.") for name in names.values())
