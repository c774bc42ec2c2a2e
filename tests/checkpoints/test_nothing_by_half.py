"""Refusals come before the first number is copied, and no number silently becomes another one."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from plugin_trainings import loader, trainer
from torch import nn

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.errors import CheckpointError


class Noted(nn.Linear):
    """A layer with a number in its extra state, which it changes in place."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("note", torch.rand(1), persistent=False)

    def get_extra_state(self) -> torch.Tensor:
        return self.note

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.note.copy_(state)


class Net(LightningModule):
    """A model; everything that goes wrong below concerns what is loaded last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = Noted(3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.last.fine = nn.Parameter(torch.rand(3, dtype=torch.float16))
        self.last.register_buffer("count", torch.ones(3, dtype=torch.int8))

    def test_step(self, batch: Any, index: int) -> None: ...

    def test_dataloader(self) -> Any:
        return loader()


def stores(key: str, value: Any) -> Callable[[dict[str, Any], Net], object]:
    return lambda weights, _: weights.update({f"last.{key}": value})


def has(parameter: Callable[[], torch.Tensor]) -> Callable[[dict[str, Any], Net], object]:
    return lambda _, net: net.last._parameters.update(bias=nn.Parameter(parameter(), requires_grad=False))


def does(hook: Callable[..., object]) -> Callable[[dict[str, Any], Net], object]:
    return lambda _, net: net.last.register_load_state_dict_pre_hook(hook)


def ties(weights: dict[str, Any], net: Net) -> None:
    net.last.weight = net.first.weight


def drops(module: nn.Module, weights: dict[str, Any], *_: Any) -> None:
    del weights["last.bias"]


@torch.inference_mode()
def inference() -> torch.Tensor:
    return torch.zeros(3)


class WritesItself(nn.Linear):
    def _load_from_state_dict(self, *_: Any) -> None:
        self.bias.data.zero_()
        self.weight = nn.Parameter(torch.zeros(9))
        raise LookupError("mine")


def writes(_: Any, net: Net) -> None:
    net.last = WritesItself(3, 3)


FAULTS: dict[str, tuple[Callable[[dict[str, Any], Net], object], str]] = {
    "missing": (lambda weights, _: weights.pop("last.bias"), r"last\.bias"),
    "left over": (stores("other", torch.ones(1)), r"last\.other"),
    "sparse": (stores("weight", torch.eye(3).to_sparse()), r"a sparse_coo tensor instead of a strided tensor"),
    "no numbers": (stores("weight", torch.ones(3, 3, device="meta")), r"weight \(no numbers: it was saved from"),
    "beyond the range": (stores("fine", torch.tensor([1, 1e6, 2])), r"fine \(1e\+06 would become inf as float16\)"),
    "complex": (stores("bias", torch.tensor([1, 1j, 2])), "complex number cannot become float32"),
    "inference tensor": (has(inference), "has an inference or expanded tensor"),
    "two for a tied one": (ties, r'last\.weight \(differs from ".*first\.weight"'),
    "a hook that drops": (does(drops), r"Missing .*last\.bias"),
    "a module that writes": (writes, "mine"),
}
NOT_STRICT = ("missing", "left over", "a hook that drops")


def snapshot(net: nn.Module) -> list[tuple[str, int, Any]]:
    tensors = dict((*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)))
    return [(name, id(value), value.detach().clone()) for name, value in tensors.items()]


def is_as(before: list[tuple[str, int, Any]], net: nn.Module) -> bool:
    now = snapshot(net)
    same_places = [entry[:2] for entry in now] == [entry[:2] for entry in before]
    return same_places and all(torch.equal(one, two) for (_, _, one), (_, _, two) in zip(before, now, strict=True))


def directly(net: Net, path: Path, strict: bool) -> None:
    load_weights(net, path, strict=strict)


def through_the_trainer(net: Net, path: Path, strict: bool) -> None:
    net.strict_loading = strict
    trainer(path.parent).test(net, ckpt_path=path, verbose=False)


@pytest.mark.parametrize(("hooked", "load"), [(False, directly), (True, directly), (False, through_the_trainer)])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_refused_has_changed_nothing(
    fault: str, hooked: bool, load: Callable[[Net, Path, bool], object], tmp_path: Path
) -> None:
    provoke, words = FAULTS[fault]
    weights, net = Net().state_dict(), Net()
    provoke(weights, net)
    if hooked:  # then torch alone knows what comes out, and the load is rehearsed
        net.register_load_state_dict_pre_hook(lambda *_: None)
    torch.save({f"module.{key}": value for key, value in weights.items()}, tmp_path / "a.pt")
    before = snapshot(net)
    for strict in (True, False):
        if strict or fault not in NOT_STRICT:
            with pytest.raises((CheckpointError, LookupError), match=words):
                load(net, tmp_path / "a.pt", strict)
            assert is_as(before, net)


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)


@given(
    numbers=st.lists(st.one_of(st.floats(), st.integers(-300, 300), st.sampled_from([65519, 65520, 2**31, 2.0**127])),
                     min_size=1, max_size=4),
    stored=st.sampled_from([*FLOATS, *WHOLE]),
    wanted=st.sampled_from([*FLOATS, *WHOLE]),
)  # fmt: skip
def test_numbers_are_at_most_rounded(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[float], stored: torch.dtype, wanted: torch.dtype
) -> None:
    path = tmp_path_factory.getbasetemp() / "numbers.pt"
    values = torch.tensor(numbers, dtype=torch.float64).to(stored)
    torch.save({"x": values}, path)
    net = nn.Module()
    net.register_buffer("x", torch.zeros(len(numbers), dtype=wanted))
    keeps = all(
        math.isfinite(old) == math.isfinite(new) if wanted in FLOATS else old == new
        for old, new in zip(values.tolist(), values.to(wanted).tolist(), strict=True)
    )
    if not keeps:
        with pytest.raises(CheckpointError, match="would become"):
            load_weights(net, path)
        assert not net.x.any()
    else:
        load_weights(net, path)
        assert torch.equal(net.x.double().nan_to_num(7), values.to(wanted).double().nan_to_num(7))


def test_ties_are_loaded_where_both_names_hold_the_same_numbers(tmp_path: Path) -> None:
    weights, net = Net().state_dict(), Net()
    ties(weights, net)
    weights["first.weight"][0] = math.nan
    torch.save({**weights, "last.weight": weights["first.weight"].clone()}, tmp_path / "a.pt")
    load_weights(net, tmp_path / "a.pt")
    assert torch.equal(net.last.weight[1:], weights["first.weight"][1:])
