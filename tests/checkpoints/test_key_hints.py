"""Keys that show which tool has changed a model: the error names it, and its advice makes the weights fit."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from torch.optim.swa_utils import AveragedModel
from wrapped_models import fill

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, plan_renaming
from lightning_gpu_tools.errors import CheckpointMismatchError

pytestmark = pytest.mark.filterwarnings("ignore")


def net(norm: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Module:
    return nn.ModuleDict({"first": norm(nn.Linear(3, 3)), "last": nn.Linear(3, 2)})


def refusal(model: nn.Module, path: Path) -> str:
    with pytest.raises(CheckpointMismatchError) as refused:
        load_weights(model, path)
    return str(refused.value)


def saved(model: nn.Module, path: Path) -> nn.Module:
    fill(model, 1)
    torch.save(nn.DataParallel(model).state_dict(), path)
    return model


def output(model: Any) -> torch.Tensor:
    return model["last"](model["first"](torch.ones(1, 3)))  # type: ignore[no-any-return]


NORMS = [weight_norm, parametrizations.weight_norm]


@pytest.mark.follows("It was saved with weight_norm on", "torch.nn.utils.parametrizations.weight_norm")
@pytest.mark.parametrize(("norm", "own"), [(NORMS[0], None), (NORMS[1], None), (NORMS[1], NORMS[0])])
def test_weights_by_weight_norm_load_after_the_advice(norm: Any, own: Any, tmp_path: Path) -> None:
    source = saved(net(norm), tmp_path / "a.pt")
    message = refusal(net(own) if own else net(), tmp_path / "a.pt")
    advice = re.search(r"with weight_norm on (\w+)\. Create the model with (torch[\w.]+) on these layers", message)
    assert advice is not None
    eval(advice[2])((model := net()).get_submodule(advice[1]))
    load_weights(model, tmp_path / "a.pt")
    assert torch.allclose(output(model), output(source))


@pytest.mark.follows("Load the weights before weight_norm is called")
@pytest.mark.parametrize("norm", NORMS)
def test_plain_weights_load_before_weight_norm_is_called(norm: Any, tmp_path: Path) -> None:
    source = saved(net(), tmp_path / "a.pt")
    assert "The model has weight_norm on first. Load the weights before" in refusal(net(norm), tmp_path / "a.pt")
    load_weights(model := net(), tmp_path / "a.pt")
    norm(model["first"])
    assert torch.allclose(output(model), output(source))


def test_lora_weights_are_named() -> None:
    adapter = {f"base_model.model.q.lora_{part}.weight": (2, 4) for part in "AB"}
    with pytest.raises(CheckpointMismatchError, match=r"holds LoRA weights(.|\n)*merge_and_unload\(\)"):
        plan_renaming(adapter, ModelKeys(shapes={"q.weight": (4, 4)}))
    with pytest.raises(CheckpointMismatchError, match=r"Load the weights before get_peft_model\."):
        plan_renaming({"q.weight": (4, 4)}, ModelKeys(shapes=adapter))


class Embedding(nn.Module):
    """A model that keeps its positions, in its older version also in its ``state_dict()``."""

    def __init__(self, *, saves: bool, dtype: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.register_buffer(
            "positions", torch.arange(8)[None].to(dtype) * (0.1 if dtype.is_floating_point else 1), persistent=saves
        )


@pytest.mark.parametrize("wrap", [lambda net: net, nn.DataParallel, AveragedModel, lambda net: nn.Sequential(net)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_buffer_no_longer_saved_is_accepted(wrap: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    source = Embedding(saves=True, dtype=dtype)
    if dtype.is_floating_point:
        source = source.half()
    torch.save(nn.DataParallel(source).state_dict(), tmp_path / "a.pt")
    model = wrap(Embedding(saves=False, dtype=dtype))
    report = load_weights(model, tmp_path / "a.pt")
    assert report.buffers == ("module.positions",)
    assert "equal to buffers that the model does not save: module.positions" in str(report)
    assert (report.unexpected, len(report.loaded)) == ((), 1)
    assert torch.equal(next(model.parameters()), source.embed.weight.float())


@pytest.mark.follows("To keep the model's numbers, use strict=False")
def test_other_numbers_in_such_a_buffer_are_refused(tmp_path: Path) -> None:
    source, model = Embedding(saves=True), Embedding(saves=False)
    source.positions += 1
    torch.save(source.state_dict(), tmp_path / "a.pt")
    message = refusal(model, tmp_path / "a.pt")
    assert "The model does not save positions (persistent=False), and has other numbers there" in message
    advice = re.search(r"use (strict=False)", message)
    assert advice is not None
    report = eval(f"load_weights(model, path, {advice[1]})", {**globals(), "model": model, "path": tmp_path / "a.pt"})
    assert (report.unexpected, report.buffers) == (("positions",), ())
    assert torch.equal(model.embed.weight, source.embed.weight)
    assert model.positions.tolist() == [[*range(8)]]
