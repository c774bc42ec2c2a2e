"""What messages about keys, shapes, entries, arguments and conversion advise is taken out of them, done, and works."""

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import code_in
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from wrapped_models import contents, fill

from lightning_gpu_tools import load_from_checkpoint, load_weights
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, plan_renaming
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError, CheckpointMismatchError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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


def loads(path: str = "a.pt", **options: Any) -> bool:
    load_weights(model := net(), path, **options)
    return contents(model) == contents(SOURCE)


# -- keys and shapes ---------------------------------------------------------------------------------------------------


@pytest.mark.follows("Too few keys fit to guess the root. To load them, use root=")
def test_too_few_keys_are_loaded_with_the_root_and_strict_false() -> None:
    stored = {"encoder.1.bias": WEIGHTS["1.bias"], "decoder.w": torch.ones(7), **below("other", {"w": torch.ones(3)})}
    torch.save(stored, "a.pt")
    message = refusal(model := net(), strict=False)
    root = ast.literal_eval(code_in(message, r"To load them, use root=(.*) and strict=False"))
    report = load_weights(model, "a.pt", root=root, strict=False)
    assert report.loaded == ("1.bias",)
    assert torch.equal(model[1].bias, WEIGHTS["1.bias"])


@pytest.mark.follows("Check root.")
def test_the_names_beside_check_root_are_roots() -> None:
    torch.save({**below("student"), "teacher.w": torch.ones(2)}, "a.pt")
    names = code_in(refusal(net(), root="pupil"), r"Neither the checkpoint \((.*?)\) nor").split(", ")
    assert names == ["student.", "teacher."]
    assert loads(root=names[0])


@pytest.mark.follows("Torch cannot copy ")
def test_weights_that_torch_cannot_copy_are_removed() -> None:
    torch.save({**WEIGHTS, "1.bias": WEIGHTS["1.bias"].to_sparse()}, "a.pt")
    message = refusal(net())
    key = code_in(message, r"Torch cannot copy (\S+) \(")
    torch.save({name: weight for name, weight in WEIGHTS.items() if name != key}, "b.pt")
    argument = code_in(message, r"remove these weights from the file and use (strict=False)")
    model = net()
    assert eval(f"load_weights(model, 'b.pt', {argument})", {"load_weights": load_weights, "model": model}).missing


@pytest.mark.follows("replace it with its clone()")
def test_a_tensor_that_cannot_be_changed_is_replaced() -> None:
    torch.save(WEIGHTS, "a.pt")
    with torch.inference_mode():
        fixed = torch.zeros(2)
    for unchangeable in (fixed, torch.zeros(1).expand(2)):
        model = net()
        model[1].bias = nn.Parameter(unchangeable, requires_grad=False)
        method = code_in(refusal(model), r"replace it with its (\w+)\(\)")
        model[1].bias = nn.Parameter(getattr(model[1].bias, method)(), requires_grad=False)
        load_weights(model, "a.pt")
        assert contents(model) == contents(SOURCE)


@pytest.mark.follows("It was saved with weight_norm.", "Load the weights before weight_norm is called")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", [weight_norm, parametrizations.weight_norm])
def test_weight_norm_in_the_file_or_in_the_model_is_named(norm: Any) -> None:
    plain, normed = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(norm(nn.Linear(3, 3)))
    torch.save(normed.state_dict(), "a.pt")
    torch.save(plain.state_dict(), "b.pt")
    assert "The model has weight_norm. Load the weights before" in refusal(normed, "b.pt")
    eval(code_in(refusal(plain, "a.pt"), r"Create the model with (torch[\w.]+) on these layers"))(plain[0])
    load_weights(plain, "a.pt")
    assert torch.allclose(plain[0].weight, normed[0].weight)


def test_lora_weights_are_named() -> None:
    adapter = {f"base_model.model.q.lora_{part}.weight": (2, 4) for part in "AB"}
    with pytest.raises(CheckpointMismatchError, match=r"holds LoRA weights(.|\n)*merge_and_unload\(\)"):
        plan_renaming(adapter, ModelKeys(shapes={"q.weight": (4, 4)}))
    with pytest.raises(CheckpointMismatchError, match=r"Load the weights before get_peft_model\."):
        plan_renaming({"q.weight": (4, 4)}, ModelKeys(shapes=adapter))


# -- entries -----------------------------------------------------------------------------------------------------------


@pytest.mark.follows("Choose one by calling lightning_gpu_tools.load_weights with root=")
def test_each_of_several_entries_is_loaded_by_its_root() -> None:
    torch.save({"teacher": WEIGHTS, "student": net().state_dict()}, "a.pt")
    message = refusal(net())
    assert code_in(message, r"by calling lightning_gpu_tools\.(\w+) with") == "load_weights"
    first, second = re.findall(r'root="(.*?)"', message)
    assert loads(root=first)
    assert not loads(root=second)


@pytest.mark.follows("Choose one with --entry NAME", "has no weights called ")
def test_an_entry_is_chosen_from_the_names_in_the_error(run: Run) -> None:
    torch.save({"teacher": WEIGHTS, "student": net().state_dict()}, "a.pt")
    code, _, message = run("convert", "a.pt", "b.pt", "--weights")
    names = code_in(message, r"several sets of weights: (.*)\. Choose one with").split(", ")
    option = code_in(message, r"Choose one with (--\w+) NAME")
    assert code == 1
    assert run("convert", "a.pt", "b.pt", "--weights", option, names[0])[0] == 0
    assert loads("b.pt")
    code, _, message = run("convert", "a.pt", "c.pt", "--weights", "--entry", "pupil")
    assert code == 1
    assert code_in(message, r"has no weights called 'pupil'; it has (.*)\.").split(", ") == names


class Custom:
    """An object that only code can build."""

    def __reduce__(self) -> tuple[Callable[[], nn.Module], tuple[()]]:
        return source, ()


def source() -> nn.Module:
    return SOURCE


@pytest.mark.follows("Ask its author for the model's state_dict(). If you trust the author, open it with ")
def test_weights_that_only_code_can_build_are_opened_on_request() -> None:
    torch.save({"net": Custom()}, "a.pt")
    message = refusal(model := net())
    call = code_in(message, r"open it with lightning_gpu_tools\.(load_weights\(.*?\)), which runs")
    eval(call, {"load_weights": load_weights, "model": model})
    assert contents(model) == contents(SOURCE)
    torch.save(getattr(source(), code_in(message, r"the model's (\w+)\(\)"))(), "b.pt")
    assert loads("b.pt")


@pytest.mark.follows("tensors by name: torch.save(")
@pytest.mark.parametrize("content", [{"a": {"b": {"c": WEIGHTS}}}, [WEIGHTS, 3], {"a": WEIGHTS["0.bias"].numpy()}])
def test_weights_in_other_places_are_saved_alone(content: Any) -> None:
    torch.save(content, "a.pt")
    with pytest.raises(BrokenCheckpointError, match="holds no weights within two dictionaries, only a ") as refusal:
        load_weights(net(), "a.pt", weights_only=False)
    exec(str(refusal.value).partition("tensors by name: ")[2], {"torch": torch, "model": SOURCE})
    assert loads("weights.pt")


# -- arguments -------------------------------------------------------------------------------------------------------


class Simple(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()


@pytest.mark.follows("must be a torch.nn.Module, got ", "Pass the class itself: load_")
@pytest.mark.parametrize(
    "call",
    [
        lambda path: load_weights(path, Simple()),
        lambda path: load_weights(Simple, path),  # type: ignore[arg-type]
        lambda path: load_from_checkpoint(path, Simple),
        lambda path: load_from_checkpoint(Simple(), path),  # type: ignore[arg-type]
    ],
)
def test_arguments_in_the_wrong_place_get_the_right_call(call: Callable[[str], Any]) -> None:
    torch.save(Simple().state_dict(), "a.pt")
    with pytest.raises(TypeError) as refusal:
        call("a.pt")
    advice = re.findall(r"load_\w+\(.*?path\)", str(refusal.value).replace("(...)", "()"))
    assert advice, refusal.value
    for advised in advice:
        assert eval(advised, {**globals(), "model": Simple(), "ModelClass": Simple, "path": "a.pt"})


# -- conversion --------------------------------------------------------------------------------------------------------


@pytest.mark.follows("Check --drop-root")
def test_options_of_convert_are_mended_by_what_the_error_shows(run: Run) -> None:
    torch.save({**below("body"), "head.w": torch.ones(2)}, "b.pt")
    code, _, message = run("convert", "b.pt", "c.pt", "--drop-root", "boby")
    assert code == 1
    option = code_in(message, r"no key begins with 'boby\.'. Check (--drop-root)")
    assert run("convert", "b.pt", "c.pt", option, "body")[0] == 0
    assert loads("c.pt")


@pytest.mark.follows("Load the weights before saving the model")
def test_a_meta_model_is_saved_after_loading_its_weights(run: Run) -> None:
    with torch.device("meta"):
        model = net()
    torch.save(model.state_dict(), "meta.pt")
    torch.save(WEIGHTS, "a.pt")
    for message in (refusal(net(), "meta.pt"), run("convert", "meta.pt", "b.pt")[2]):
        assert "it was saved from the meta device. Load the weights before saving the model" in message
    load_weights(model, "a.pt")
    torch.save(model.state_dict(), "meta.pt")
    assert loads("meta.pt")


@pytest.mark.follows("(select with --entry)")
def test_weights_that_were_left_out_are_selected(run: Run) -> None:
    torch.save({"model": net().state_dict(), "ema": WEIGHTS}, "a.pt")
    _, message, _ = run("convert", "a.pt", "b.safetensors")
    name, option = code_in(message, r'without "(\w+)" \(select'), code_in(message, r"\(select with (--entry)\)")
    assert run("convert", "a.pt", "c.safetensors", option, name)[0] == 0
    assert loads("c.safetensors")


@pytest.mark.follows("To load only the weights, without opening the rest, use ")
def test_a_file_with_classes_is_converted_as_the_error_says(run: Run) -> None:
    torch.save({"model": WEIGHTS, "settings": Custom()}, "a b.pt")
    *_, message = run("convert", "a b.pt", "b.pt")
    call = code_in(message, r"use lightning_gpu_tools\.(load_weights\(.*?\)), or")
    eval(call, {"load_weights": load_weights, "model": (model := net())})
    assert contents(model) == contents(SOURCE)
    assert run(*shlex.split(message.partition("or: lightning-gpu-tools checkpoint ")[2]))[0] == 0
    assert loads("weights.pt")
