"""load_from_checkpoint, compared with Lightning's own."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import code_in
from lightning.pytorch import LightningModule
from torch import nn
from trainings import quiet_trainer
from wrapped_models import WRAPPINGS

from lightning_gpu_tools import load_from_checkpoint
from lightning_gpu_tools.checkpoints.writing import write_checkpoint
from lightning_gpu_tools.errors import AmbiguousCheckpointError, BrokenCheckpointError, UnsafeCheckpointError


class Lit(LightningModule):
    def __init__(self, width: int = 2, wrap: str = "plain") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = WRAPPINGS[wrap](nn.Linear(width, width))
        self.trace: list[str] = []

    def configure_model(self) -> None:
        self.trace.append("configure_model")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.trace.append(f"on_load_checkpoint {sorted(checkpoint['state_dict'])}")

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        self.trace.append("load_state_dict")
        return super().load_state_dict(*arguments, **options)


class OneArgument(LightningModule):
    def __init__(self, settings: dict[str, Any], other: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters(settings)
        self.settings, self.other = dict(settings), other
        self.net = nn.Linear(settings["width"], 1)


class AnyArguments(LightningModule):
    def __init__(self, width: int = 2, **rest: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.rest = rest
        self.net = nn.Linear(width, 1)


def save_lit(model: LightningModule, path: Path, **changed: Any) -> Path:
    """Save a model, with other entries in the file."""
    trainer = quiet_trainer(path.parent)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(path, weights_only=True)
    if changed:
        write_checkpoint({**torch.load(path), **changed}, path)
    return path


def test_hyperparameters_and_hooks_are_lightnings(tmp_path: Path) -> None:
    path = save_lit(Lit(width=3), tmp_path / "a.ckpt")
    mine, theirs = load_from_checkpoint(Lit, path), Lit.load_from_checkpoint(path)
    assert mine.trace == [*theirs.trace, "load_state_dict"]  # ours asks it twice, the first time to check
    assert dict(mine.hparams) == dict(theirs.hparams) == {"width": 3, "wrap": "plain"}
    assert torch.equal(mine.net.weight, theirs.net.weight)


def test_a_class_loads_what_another_wrapping_of_it_saved(tmp_path: Path) -> None:
    wrap = "compile(DataParallel)"
    source = Lit(width=3, wrap=wrap)
    path = save_lit(source, tmp_path / "a.ckpt")
    plain = load_from_checkpoint(Lit, path, wrap="plain")
    assert torch.equal(plain.net.weight, next(source.parameters()))
    assert plain.trace[1] == "on_load_checkpoint ['net.bias', 'net.weight']"
    back = load_from_checkpoint(Lit, save_lit(plain, tmp_path / "b.ckpt"), wrap=wrap)
    assert torch.equal(next(back.parameters()), plain.net.weight)


@pytest.mark.follows("hparams_file must end in ")
def test_arguments_reach_the_class_as_in_lightning(tmp_path: Path) -> None:
    path, new = save_lit(OneArgument({"width": 3, "depth": 1}), tmp_path / "one.ckpt"), {"depth": 5, "other": 7}
    for model in (load_from_checkpoint(OneArgument, path, **new), OneArgument.load_from_checkpoint(path, **new)):
        assert (model.settings["width"], model.settings["depth"], model.other) == (3, 5, 7)
    path = save_lit(AnyArguments(width=4, a=1), tmp_path / "any.ckpt")
    for model in (load_from_checkpoint(AnyArguments, path, b=2), AnyArguments.load_from_checkpoint(path, b=2)):
        assert model.rest == {"a": 1, "b": 2}
    path = save_lit(Lit(width=3), tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"must end in \.yaml or \.yml, got '.*h\.toml'") as refusal:
        load_from_checkpoint(Lit, path, hparams_file=tmp_path / "h.toml")
    for ending in re.findall(r"\.yaml|\.yml", str(refusal.value)):
        (tmp_path / f"h{ending}").write_text("width: 3\nwrap: DataParallel")
        assert isinstance(load_from_checkpoint(Lit, path, hparams_file=tmp_path / f"h{ending}").net, nn.DataParallel)


def test_bare_weights_and_another_root_load_into_a_class(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    torch.save(nn.DataParallel(net).state_dict(), tmp_path / "a.pt")
    assert torch.equal(load_from_checkpoint(Lit, tmp_path / "a.pt").net.weight, net.weight)
    torch.save({"state_dict": nn.Linear(2, 2).state_dict(), "ema": net.state_dict()}, tmp_path / "ema.pt")
    assert torch.equal(load_from_checkpoint(Lit, tmp_path / "ema.pt", root="ema").net.weight, net.weight)
    torch.save({"teacher": net.state_dict(), "student": nn.Linear(2, 2).state_dict()}, tmp_path / "b.pt")
    assert torch.equal(load_from_checkpoint(Lit, tmp_path / "b.pt", root="teacher").net.weight, net.weight)
    with pytest.raises(AmbiguousCheckpointError):
        load_from_checkpoint(Lit, tmp_path / "b.pt")


@pytest.mark.follows("If you trust the author of the file: ")
def test_hyperparameters_of_any_class_come_from_a_trusted_file(tmp_path: Path) -> None:
    path = save_lit(AnyArguments(where=tmp_path), tmp_path / "a.ckpt")
    with pytest.raises(UnsafeCheckpointError, match="If you trust the author of the file") as caught:
        load_from_checkpoint(AnyArguments, path)
    line = str(caught.value).rpartition("author of the file: ")[2]
    model = eval(line, {"load_from_checkpoint": load_from_checkpoint, "AnyArguments": AnyArguments})
    assert model.rest == {"where": tmp_path}


def test_the_device_is_the_cpu_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:2")
        path = save_lit(Lit(), tmp_path / "a.ckpt")
    assert load_from_checkpoint(Lit, path).device.type == "cpu"
    assert load_from_checkpoint(Lit, path, map_location={"cuda:2": "cpu"}).device.type == "cpu"
    with pytest.raises(RuntimeError, match="CUDA"):  # the caller's wish, not the file's fault
        load_from_checkpoint(Lit, path, map_location="cuda:0")


CLI = "lightning.pytorch.cli.instantiate_module"


@pytest.mark.parametrize(
    ("hparams", "words"),
    [
        ({"_instantiator": "os.system"}, "requests 'os.system' to build"),
        ({"_instantiator": CLI, "_class_path": "subprocess.Popen"}, "requests the class 'subprocess.Popen'"),
    ],
)
def test_a_checkpoint_cannot_choose_what_builds_the_model(tmp_path: Path, hparams: dict[str, str], words: str) -> None:
    path = save_lit(Lit(), tmp_path / "a.ckpt", hyper_parameters=hparams)
    with pytest.raises(UnsafeCheckpointError, match=words):
        load_from_checkpoint(Lit, path)


MINE = """
import torch
from lightning.pytorch import LightningModule

class Mine(LightningModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.net = torch.nn.Linear(width, width)
"""


@pytest.mark.follows("If you trust the checkpoint, import it first")
def test_a_class_saved_by_the_cli_is_built_once_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    (tmp_path / "my_models.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    hparams = {"_instantiator": CLI, "_class_path": "my_models.Mine", "width": 2}
    path = save_lit(source := Lit(), tmp_path / "a.ckpt", hyper_parameters=hparams)
    with pytest.raises(UnsafeCheckpointError, match="import it first") as refusal:
        load_from_checkpoint(LightningModule, path)
    importlib.import_module(code_in(str(refusal.value), r"requests the class '(\w+)\.\w+'"))
    assert torch.equal(load_from_checkpoint(LightningModule, path).net.weight, source.net.weight)


@pytest.mark.follows("keys. Pass them in an hparams_file")
def test_other_hyperparameters_are_passed_as_the_error_says(tmp_path: Path) -> None:
    path = save_lit(source := Lit(), tmp_path / "a.ckpt", hyper_parameters=[2])
    with pytest.raises(BrokenCheckpointError) as refusal:
        load_from_checkpoint(Lit, path)
    (tmp_path / "h.yaml").write_text("width: 2")
    options: Any = {code_in(str(refusal.value), r"in an (hparams_file)\."): tmp_path / "h.yaml"}
    assert torch.equal(load_from_checkpoint(Lit, path, **options).net.weight, source.net.weight)
