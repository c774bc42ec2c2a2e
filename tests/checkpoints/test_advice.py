"""What messages about keys, shapes, entries and conversion advise is taken out of them, done, and works."""

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from wrapped_models import contents, fill

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import CheckpointError

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``checkpoint`` in a folder, and return its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> tuple[int, str]:
        code = main(["checkpoint", *arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return command


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


SOURCE = net()
fill(SOURCE, 1)
WEIGHTS = SOURCE.state_dict()


def below(root: str, weights: Any = WEIGHTS) -> dict[str, Any]:
    return {f"{root}.{key}": value for key, value in weights.items()}


def refusal(model: nn.Module, path: object = "a.pt", **options: Any) -> str:
    with pytest.raises(CheckpointError) as refused:
        load_weights(model, str(path), **options)
    return str(refused.value)


def found(pattern: str, message: str) -> str:
    match = re.search(pattern, message)
    assert match is not None, message
    return match[1]


def loads(path: str = "a.pt", **options: Any) -> bool:
    load_weights(model := net(), path, **options)
    return contents(model) == contents(SOURCE)


# -- keys and shapes ---------------------------------------------------------------------------------------------------


@pytest.mark.follows("Too few keys fit to guess the root. To load them, use root=")
def test_too_few_keys_are_loaded_with_the_root_and_strict_false(run: Run) -> None:
    stored = {"encoder.1.bias": WEIGHTS["1.bias"], "decoder.w": torch.ones(7), **below("other", {"w": torch.ones(3)})}
    torch.save(stored, "a.pt")
    message = refusal(model := net(), strict=False)
    root = ast.literal_eval(found(r"To load them, use root=(.*) and strict=False", message))
    report = load_weights(model, "a.pt", root=root, strict=False)
    assert report.loaded == ("1.bias",)
    assert torch.equal(model[1].bias, WEIGHTS["1.bias"])


@pytest.mark.follows("Check root.")
def test_the_names_beside_check_root_are_roots(run: Run) -> None:
    torch.save({**below("student"), "teacher.w": torch.ones(2)}, "a.pt")
    names = found(r"Neither the checkpoint \((.*?)\) nor", refusal(net(), root="pupil")).split(", ")
    assert names == ["student.", "teacher."]
    assert loads(root=names[0])


@pytest.mark.follows("Torch cannot copy ")
def test_weights_that_torch_cannot_copy_are_removed(run: Run) -> None:
    torch.save({**WEIGHTS, "1.bias": WEIGHTS["1.bias"].to_sparse()}, "a.pt")
    message = refusal(net())
    key = found(r"Torch cannot copy (\S+) \(", message)
    torch.save({name: weight for name, weight in WEIGHTS.items() if name != key}, "b.pt")
    argument = found(r"remove these weights from the file and use (strict=False)", message)
    model = net()
    assert eval(f"load_weights(model, 'b.pt', {argument})", {"load_weights": load_weights, "model": model}).missing


@pytest.mark.follows("replace it with its clone()")
def test_a_tensor_that_cannot_be_changed_is_replaced(run: Run) -> None:
    torch.save(WEIGHTS, "a.pt")
    with torch.inference_mode():
        fixed = torch.zeros(2)
    for unchangeable in (fixed, torch.zeros(1).expand(2)):
        model = net()
        model[1].bias = nn.Parameter(unchangeable, requires_grad=False)
        method = found(r"replace it with its (\w+)\(\)", refusal(model))
        model[1].bias = nn.Parameter(getattr(model[1].bias, method)(), requires_grad=False)
        load_weights(model, "a.pt")
        assert contents(model) == contents(SOURCE)


# -- entries -----------------------------------------------------------------------------------------------------------


@pytest.mark.follows("Choose one by calling lightning_gpu_tools.load_weights with root=")
def test_each_of_several_entries_is_loaded_by_its_root(run: Run) -> None:
    torch.save({"teacher": WEIGHTS, "student": net().state_dict()}, "a.pt")
    message = refusal(net())
    assert found(r"by calling lightning_gpu_tools\.(\w+) with", message) == "load_weights"
    first, second = re.findall(r'root="(.*?)"', message)
    assert loads(root=first)
    assert not loads(root=second)


@pytest.mark.follows("Choose one with --entry NAME", "has no weights called ")
def test_an_entry_is_chosen_from_the_names_in_the_error(run: Run) -> None:
    torch.save({"teacher": WEIGHTS, "student": net().state_dict()}, "a.pt")
    code, message = run("convert", "a.pt", "b.pt", "--weights")
    names = found(r"several sets of weights: (.*)\. Choose one with", message).split(", ")
    option = found(r"Choose one with (--\w+) NAME", message)
    assert code == 1
    assert run("convert", "a.pt", "b.pt", "--weights", option, names[0])[0] == 0
    assert loads("b.pt")
    code, message = run("convert", "a.pt", "c.pt", "--weights", "--entry", "pupil")
    assert code == 1
    assert found(r"has no weights called 'pupil'; it has (.*)\.", message).split(", ") == names


class Custom:
    """An object that only code can build."""

    def __reduce__(self) -> tuple[Callable[[], nn.Module], tuple[()]]:
        return source, ()


def source() -> nn.Module:
    return SOURCE


@pytest.mark.follows("Ask its author for the model's state_dict(). If you trust the author, open it with ")
def test_weights_that_only_code_can_build_are_opened_on_request(run: Run) -> None:
    torch.save({"net": Custom()}, "a.pt")
    message = refusal(model := net())
    call = found(r"open it with lightning_gpu_tools\.(load_weights\(.*?\)), which runs", message)
    eval(call, {"load_weights": load_weights, "model": model})
    assert contents(model) == contents(SOURCE)
    torch.save(getattr(source(), found(r"the model's (\w+)\(\)", message))(), "b.pt")
    assert loads("b.pt")


# -- conversion --------------------------------------------------------------------------------------------------------


@pytest.mark.follows("Check --drop-root")
def test_options_of_convert_are_mended_by_what_the_error_shows(run: Run) -> None:
    torch.save({**below("body"), "head.w": torch.ones(2)}, "b.pt")
    code, message = run("convert", "b.pt", "c.pt", "--drop-root", "boby")
    assert code == 1
    option = found(r"no key begins with 'boby\.'. Check (--drop-root)", message)
    assert run("convert", "b.pt", "c.pt", option, "body")[0] == 0
    assert loads("c.pt")


@pytest.mark.follows("Load the weights before saving the model")
def test_a_meta_model_is_saved_after_loading_its_weights(run: Run) -> None:
    with torch.device("meta"):
        model = net()
    torch.save(model.state_dict(), "meta.pt")
    torch.save(WEIGHTS, "a.pt")
    for message in (refusal(net(), "meta.pt"), run("convert", "meta.pt", "b.pt")[1]):
        assert "it was saved from the meta device. Load the weights before saving the model" in message
    load_weights(model, "a.pt")
    torch.save(model.state_dict(), "meta.pt")
    assert loads("meta.pt")


@pytest.mark.follows("(select with --entry)")
def test_weights_that_were_left_out_are_selected(run: Run) -> None:
    torch.save({"model": net().state_dict(), "ema": WEIGHTS}, "a.pt")
    _, message = run("convert", "a.pt", "b.safetensors")
    name, option = found(r'without "(\w+)" \(select', message), found(r"\(select with (--entry)\)", message)
    assert run("convert", "a.pt", "c.safetensors", option, name)[0] == 0
    assert loads("c.safetensors")


@pytest.mark.follows("To load only the weights, without opening the rest, use ")
def test_a_file_with_classes_is_converted_as_the_error_says(run: Run) -> None:
    torch.save({"model": WEIGHTS, "settings": Custom()}, "a b.pt")
    _, message = run("convert", "a b.pt", "b.pt")
    call = found(r"use lightning_gpu_tools\.(load_weights\(.*?\)), or", message)
    eval(call, {"load_weights": load_weights, "model": (model := net())})
    assert contents(model) == contents(SOURCE)
    assert run(*shlex.split(message.partition("or: lightning-gpu-tools checkpoint ")[2]))[0] == 0
    assert loads("weights.pt")
