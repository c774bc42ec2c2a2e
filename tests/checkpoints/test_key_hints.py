"""Keys that show which tool has changed a model: the error names it, and its advice makes the weights fit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from torch.optim.swa_utils import AveragedModel

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, plan_renaming
from lightning_gpu_tools.errors import CheckpointMismatchError

pytestmark = pytest.mark.filterwarnings("ignore")


def refusal(model: nn.Module, path: Path) -> str:
    with pytest.raises(CheckpointMismatchError) as refused:
        load_weights(model, path)
    return str(refused.value)


@pytest.mark.follows("It was saved with weight_norm.", "Load the weights before weight_norm is called")
@pytest.mark.parametrize("norm", [weight_norm, parametrizations.weight_norm])
def test_weight_norm_in_the_file_or_in_the_model_is_named(norm: Any, tmp_path: Path) -> None:
    plain, normed = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(norm(nn.Linear(3, 3)))
    torch.save(normed.state_dict(), tmp_path / "a.pt")
    torch.save(plain.state_dict(), tmp_path / "b.pt")
    assert "The model has weight_norm. Load the weights before" in refusal(normed, tmp_path / "b.pt")
    advice = re.search(r"Create the model with (torch[\w.]+) on these layers", refusal(plain, tmp_path / "a.pt"))
    assert advice is not None
    eval(advice[1])(plain[0])
    load_weights(plain, tmp_path / "a.pt")
    assert torch.allclose(plain[0].weight, normed[0].weight)


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


def test_such_a_buffer_may_be_in_a_part_of_the_file(tmp_path: Path) -> None:
    source = nn.ModuleList([Embedding(saves=True), Embedding(saves=False)])
    torch.save(source.state_dict(), tmp_path / "a.pt")
    report = load_weights(nn.ModuleList([Embedding(saves=False), Embedding(saves=False)]), tmp_path / "a.pt")
    assert (report.buffers, report.kept, len(report.loaded)) == (("0.positions",), (), 2)


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
