"""Weights out of files that hold objects of any class: none of these is imported, called or needed."""

import argparse
import copy
import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import Exploit
from torch import nn
from wrapped_models import ARCHITECTURES, TiedTransformer, contents, normed

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.reading import read_weights
from lightning_gpu_tools.errors import UnsafeCheckpointError


class Mode(enum.Enum):
    FAST = 1


@dataclasses.dataclass
class Config:
    width: int = 4
    loss: Any = None


class Config2(dict):  # type: ignore[type-arg]
    """A stand-in for OmegaConf's DictConfig."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), TiedTransformer())


NET = net()
WEIGHTS = NET.state_dict()
LIGHTNING = {"pytorch-lightning_version": "2.6.0", "state_dict": WEIGHTS, "optimizer_states": []}
FILES: dict[str, Any] = {
    "arguments, as timm writes": {"state_dict": WEIGHTS, "args": argparse.Namespace(lr=0.1), "arch": "a", "epoch": 3},
    "configuration, as fairseq writes": {"model": WEIGHTS, "cfg": Config2(a=Config()), "extra_state": {"m": Mode.FAST}},
    "hyperparameters": {**LIGHTNING, "hyper_parameters": {"loss": nn.CrossEntropyLoss(torch.ones(3)), "cls": Config}},
    "module": NET,
    "module, as YOLO writes": {"epoch": -1, "model": NET, "ema": None, "optimizer": None, "train_args": Config()},
}


@pytest.mark.parametrize("name", FILES)
def test_weights_load_from_files_that_hold_classes(name: str, tmp_path: Path) -> None:
    path, witness = tmp_path / "a.pt", tmp_path / "it ran"
    held = FILES[name]
    torch.save({**held, "gift": Exploit(witness)} if isinstance(held, dict) else held, path)
    old = tmp_path / "old.pt"
    torch.save(held, old, _use_new_zipfile_serialization=False)
    for file in (path, old):
        model = net()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        report = load_weights(model, file)
        assert contents(model) == contents(NET)
        assert report.unread
        assert "not read, because opening would run code" in str(report)
    assert not witness.exists()


@pytest.mark.parametrize("make", [make for make in ARCHITECTURES if make is not normed])
def test_a_pickled_module_has_the_weights_of_its_state_dict(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = make()
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    model.alias = next(model.children())  # a module in two places
    torch.save(model, tmp_path / "a.pt")
    weights, *_ = read_weights(tmp_path / "a.pt")
    expected = model.state_dict()
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    report = load_weights(copy.deepcopy(model), tmp_path / "a.pt", weights_only=False)
    assert (report.loaded, report.unread) == ((*expected,), ())


def test_extra_states_of_plain_data_are_kept_and_others_left_out(tmp_path: Path) -> None:
    states = {"a": {"n": [1, (2.5, None, torch.ones(2))]}, "b": Config(), "c": {1, 2}, "d": [Mode]}
    weights = nn.Sequential(nn.Linear(2, 2)).state_dict()
    weights.update({f"{key}._extra_state": state for key, state in states.items()})
    torch.save({"state_dict": weights, "mode": Mode.FAST}, tmp_path / "a.pt")
    read = read_weights(tmp_path / "a.pt")[0]["state_dict"]
    assert list(read) == ["0.weight", "0.bias", "a._extra_state"]
    assert read._metadata == weights._metadata  # type: ignore[attr-defined]
    assert repr(read["a._extra_state"]) == repr(states["a"])


class Subclass(torch.Tensor):
    pass


class Packed:
    """An object that is written like the parameters of a library that quantizes."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.parts = [{"numbers": numbers}]


SPECIAL: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
    f"{Subclass.__module__}.Packed": lambda: Packed(torch.ones(2)),
    f"{Subclass.__module__}.Subclass": lambda: torch.ones(3).as_subclass(Subclass),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SPECIAL)
def test_weights_that_take_code_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    torch.save({"state_dict": {"plain": torch.ones(2), "odd": SPECIAL[kind]()}, "mode": Mode.FAST}, tmp_path / "a.pt")
    with pytest.raises(UnsafeCheckpointError, match=rf"not plain tensors, .* \({kind}\): odd\."):
        read_weights(tmp_path / "a.pt")
