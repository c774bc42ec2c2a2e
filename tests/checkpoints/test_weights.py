"""load_weights on real files, real architectures and real wrappers."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from wrapped_models import ARCHITECTURES, WRAPPINGS, contents, fill

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.errors import CheckpointMismatchError


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_wrapping_of_a_real_architecture_loads_into_any_other(
    architecture: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    source_net, target_net = architecture(), architecture()
    fill(source_net, 1)
    fill(target_net, 2)
    expected = contents(source_net)
    for saved_as, wrap_source in WRAPPINGS.items():
        torch.save(wrap_source(copy.deepcopy(source_net)).state_dict(), tmp_path / "a.pt")
        for loaded_as, wrap_target in WRAPPINGS.items():
            target = wrap_target(copy.deepcopy(target_net))
            report = load_weights(target, tmp_path / "a.pt")
            assert contents(target) == expected, (saved_as, loaded_as, str(report))


@pytest.mark.follows("report the rest, use strict=False")
def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    net = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
    torch.save({"state_dict": net.state_dict(), "epoch": 1}, tmp_path / "last.ckpt")
    report = load_weights(nn.Sequential(nn.Linear(2, 2)), tmp_path / "last.ckpt")
    assert str(report) == 'last.ckpt: loaded 2 weights; removed "module." from 2 keys'
    assert report.entry == "state_dict"
    assert report.loaded == ("0.weight", "0.bias")
    assert report.renamed == {"module.0.weight": "0.weight", "module.0.bias": "0.bias"}
    averaged = load_weights(AveragedModel(net), tmp_path / "last.ckpt")
    assert str(averaged) == 'last.ckpt: loaded 2 weights; added "module." to 2 keys; kept: n_averaged'
    again = load_weights(net, tmp_path / "last.ckpt")
    assert str(again) == "last.ckpt: loaded 2 weights"
    assert again.renamed == {}
    wide, wider = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, width)) for width in (3, 4))
    torch.save(wide.state_dict(), tmp_path / "a.pt")
    with pytest.raises(CheckpointMismatchError, match=r"a\.pt does not fit Sequential\. 2 of the model's 4 keys fit"):
        load_weights(wider, tmp_path / "a.pt")
    partial = load_weights(wider, tmp_path / "a.pt", strict=False)
    assert partial.mismatched == (("1.weight", (3, 2), (4, 2)), ("1.bias", (3,), (4,)))
    assert (partial.loaded, partial.missing) == (("0.weight", "0.bias"), ())
    assert "other shape: 1.weight, 1.bias" in str(partial)


class Resized(nn.Module):
    """A module that takes positions from a file with more or fewer of them, like vision transformers."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(positions, 2))
        self.register_load_state_dict_pre_hook(self.resize)

    @staticmethod
    def resize(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}pos" in state_dict:
            state_dict[f"{prefix}pos"] = state_dict[f"{prefix}pos"][:1].expand(module.pos.shape)


class Translating(nn.Module):
    """Parts whose hooks translate names and shapes; its head is of its own size."""

    def __init__(self, weight_norm: Callable[[nn.Module], nn.Module], positions: int, classes: int) -> None:
        super().__init__()
        self.conv, self.patches = weight_norm(nn.Conv1d(2, 2, 3)), nn.DataParallel(Resized(positions))
        self.out, self.head = nn.Linear(2, 2), weight_norm(nn.Linear(2, classes))


@pytest.mark.parametrize("strict", [True, False])
def test_what_hooks_translate_is_loaded_and_reported_as_loaded(strict: bool, tmp_path: Path) -> None:
    with pytest.warns(FutureWarning):
        source = Translating(nn.utils.weight_norm, 3, classes=4)
    torch.save(nn.DataParallel(source).state_dict(), tmp_path / "a.pt")
    target = Translating(parametrizations.weight_norm, 5, classes=4)
    report = load_weights(target, tmp_path / "a.pt", strict=strict)
    assert torch.allclose(target.conv.weight, source.conv.weight)
    assert torch.equal(target.patches.module.pos, source.patches.module.pos[:1].expand(5, 2))
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    assert report.loaded == tuple(target.state_dict())
    assert str(report) == 'a.pt: loaded 9 weights; removed "module." from 4 keys'


def test_engines_are_known_by_name(tmp_path: Path) -> None:
    class DeepSpeedEngine(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"
    source, target = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    torch.save(source.state_dict(), tmp_path / "a.pt")
    report = load_weights(DeepSpeedEngine(target), tmp_path / "a.pt")
    assert report.renamed == {"0.weight": "module.0.weight", "0.bias": "module.0.bias"}
    assert torch.equal(source[0].weight, target[0].weight)


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
    words = r"The model does not save positions \(persistent=False\), and has other numbers there.* use strict=False"
    with pytest.raises(CheckpointMismatchError, match=words):
        load_weights(model, tmp_path / "a.pt")
    report = load_weights(model, tmp_path / "a.pt", strict=False)
    assert (report.unexpected, report.buffers) == (("positions",), ())
    assert torch.equal(model.embed.weight, source.embed.weight)
    assert model.positions.tolist() == [[*range(8)]]
