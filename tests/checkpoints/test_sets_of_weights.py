"""Files with several sets of weights: which one is taken, what is said of the others, and how to get them."""

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.key_renaming import is_average


def net(value: float) -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    for tensor in made.state_dict().values():
        tensor.fill_(value)
    return made


def values(model: nn.Module) -> set[float]:
    return {number for parameter in model.parameters() for number in parameter.flatten().tolist()}


def below(root: list[str], keys: Mapping[str, Any]) -> dict[str, Any]:
    return {".".join([*root, key]): value for key, value in keys.items()}


def in_ema_pytorch(raw: Mapping[str, Any], average: Mapping[str, Any]) -> dict[str, Any]:
    weights = below(["online_model"], raw) | below(["ema_model"], average)
    return {**weights, "initted": torch.tensor([True]), "step": torch.tensor([7])}


AVERAGE = net(2).state_dict()
AVERAGED_MODEL = AveragedModel(net(2)).state_dict()
LIGHTNING = {"pytorch-lightning_version": "2.6.6"}
SWA_STATE = {"callbacks": {"StochasticWeightAveraging": {"average_model_state": AVERAGE}}}
# As timm, Lightning's callbacks and others write them: content from the raw weights, and the entry of the average.
SPELLINGS: dict[str, tuple[Callable[[Any], Mapping[str, Any]], str]] = {
    "timm": (lambda raw: {"state_dict": raw, "state_dict_ema": AVERAGE, "epoch": 1}, "state_dict_ema"),
    "an AveragedModel": (lambda raw: {"net": raw, "swa_model": AVERAGED_MODEL}, "swa_model"),
    "Lightning's SWA": (
        lambda raw: {**LIGHTNING, "state_dict": raw, **SWA_STATE},
        "callbacks.StochasticWeightAveraging.average_model_state",
    ),
    "an attribute": (lambda raw: below(["net"], raw) | below(["ema_net"], AVERAGE), "ema_net."),
    "ema-pytorch in a module": (
        lambda raw: below(["net"], raw) | below(["ema"], in_ema_pytorch(raw, AVERAGE)),
        "ema.ema_model.",
    ),
    "ema-pytorch": (lambda raw: {"model": raw, "ema": in_ema_pytorch(raw, AVERAGE)}, "ema"),
    "YOLO": (lambda raw: {"epoch": 1, "model": net(1), "ema": net(2).half(), "updates": 3}, "ema"),
}


@pytest.mark.follows("call load_weights with ")
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_average_is_named_and_loaded_on_request(spelling: str, tmp_path: Path) -> None:
    make, entry = SPELLINGS[spelling]
    path = tmp_path / "a.pt"
    torch.save(make(net(1).state_dict()), path)
    target = net(0)
    with pytest.warns(
        UserWarning, match=rf'a\.pt: loaded ".*; to load .*, call load_weights with root="{re.escape(entry)}"'
    ):
        report = load_weights(target, path)
    assert values(target) == {1}
    assert report.others == (entry,)
    assert f'root="{entry}"' in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is chosen now
        for root, number in ((entry, 2), (report.entry or report.root, 1)):
            assert load_weights(target, path, root=root).others == ()
            assert values(target) == {number}


def test_the_trainers_average_is_taken_and_the_raw_weights_named(tmp_path: Path) -> None:
    states = {"state_dict": net(1).state_dict(), "current_model_state": AVERAGE}
    torch.save({**LIGHTNING, **states, "averaging_state": {"n_averaged": torch.tensor(3)}}, tmp_path / "a.ckpt")
    target = net(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "state_dict" is the average here, as WeightAveraging means it
        report = load_weights(target, tmp_path / "a.ckpt")
    assert values(target) == {1}
    assert report.others == ("current_model_state",)


@pytest.mark.parametrize("name", ["ema", "model_ema", "state_dict_ema", "g_ema", "emaModel", "swa_model", "net.avg."])
def test_names_of_averages_are_known(name: str) -> None:
    assert is_average(name)
    assert not is_average(name.replace("ema", "schema").replace("swa", "swap").replace("avg", "gavg"))
