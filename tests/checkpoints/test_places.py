"""Weights in folders, and what users pass in the place of a model or a path."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from plugin_trainings import Lit, trainer
from torch import nn
from wrapped_models import contents

from lightning_gpu_tools import load_from_checkpoint, load_weights
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import BrokenCheckpointError


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


SOURCE = net()
WEIGHTS = SOURCE.state_dict()


def has_loaded(path: Any, **options: Any) -> bool:
    target = net()
    load_weights(target, path, **options)
    return contents(target) == contents(SOURCE)


# -- folders ---------------------------------------------------------------------------------------------------------


def train(folder: Path, **options: Any) -> Path:
    """Train, and return the folder of the run, as a logger of Lightning has it."""
    logger = CSVLogger(folder)
    run = trainer(folder, logger=logger, enable_checkpointing=True, **options)
    run.fit(Lit())
    return Path(logger.log_dir)


def test_the_folder_of_a_run_leads_to_its_only_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(tmp_path)
    (file,) = (folder / "checkpoints").iterdir()
    expected = torch.load(file)["state_dict"]["net.0.weight"]
    os.symlink(file.name, file.with_name("last.ckpt"))  # as save_last="link"
    for place in (folder, folder.parent):
        target = Lit(seed=1)
        report = load_weights(target, place)
        assert report.path == str(file)
        assert torch.equal(target.net[0].weight, expected)
    assert torch.equal(load_from_checkpoint(Lit, folder).net[0].weight, expected)
    trainer(tmp_path).test(target := Lit(seed=1), ckpt_path=folder, verbose=False)
    assert torch.equal(target.net[0].weight, expected)
    for command in (("inspect", folder), ("verify", folder), ("convert", folder, tmp_path / "a.pt")):
        assert main(["checkpoint", *map(str, command)]) == 0


@pytest.mark.follows("Use one of them, the newest first: ")
def test_the_checkpoints_of_a_run_are_named_the_newest_first(tmp_path: Path) -> None:
    folder = train(tmp_path)
    (file,) = (folder / "checkpoints").iterdir()
    shutil.copy(file, file.with_name("older one.ckpt"))
    os.utime(file.with_name("older one.ckpt"), (1, 1))
    with pytest.raises(BrokenCheckpointError, match="is a folder with 2 checkpoints") as refusal:
        load_weights(Lit(), folder)
    named = str(refusal.value).partition("the newest first: ")[2].split(", ")
    assert named == [str(file), str(file.with_name("older one.ckpt"))]
    assert all(load_weights(Lit(), path).loaded for path in named)


def test_a_folder_by_hugging_face_leads_to_its_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text("{}")
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    assert has_loaded(tmp_path)
    torch.save([{}], tmp_path / "optimizer.pt")  # as their Trainer leaves it
    assert has_loaded(tmp_path)
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"older")
    assert has_loaded(tmp_path)


@pytest.mark.follows("tensors by name: torch.save(")
@pytest.mark.parametrize("content", [{"a": {"b": {"c": WEIGHTS}}}, [WEIGHTS, 3], {"a": WEIGHTS["0.bias"].numpy()}])
def test_weights_in_other_places_are_saved_alone(content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "a.pt")
    with pytest.raises(BrokenCheckpointError, match="holds no weights within two dictionaries, only a ") as refusal:
        load_weights(net(), "a.pt", weights_only=False)
    exec(str(refusal.value).partition("tensors by name: ")[2], {"torch": torch, "model": SOURCE})
    assert has_loaded("weights.pt")


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
def test_arguments_in_the_wrong_place_get_the_right_call(call: Callable[[str], Any], tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    torch.save(Simple().state_dict(), path)
    with pytest.raises(TypeError) as refusal:
        call(path)
    advice = re.findall(r"load_\w+\(.*?path\)", str(refusal.value).replace("(...)", "()"))
    assert advice, refusal.value
    for advised in advice:
        assert eval(advised, {**globals(), "model": Simple(), "ModelClass": Simple, "path": path})
