"""Folders that lead to a checkpoint."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from plugin_trainings import Lit, trainer
from torch import nn

from lightning_gpu_tools import load_from_checkpoint, load_weights
from lightning_gpu_tools.errors import BrokenCheckpointError


@pytest.mark.follows("Use one of them, the newest first: ")
def test_the_folder_of_a_run_leads_to_its_checkpoints(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    logger = CSVLogger(tmp_path)
    trainer(tmp_path, logger=logger, enable_checkpointing=True).fit(Lit())
    folder = Path(logger.log_dir)
    (file,) = (folder / "checkpoints").iterdir()
    expected = torch.load(file)["state_dict"]["net.0.weight"]
    os.symlink(file.name, file.with_name("last.ckpt"))  # as save_last="link"
    for place in (folder, folder.parent):
        assert load_weights(target := Lit(seed=1), place).path == str(file)
        assert torch.equal(target.net[0].weight, expected)
    assert torch.equal(load_from_checkpoint(Lit, folder).net[0].weight, expected)
    trainer(tmp_path).test(target := Lit(seed=1), ckpt_path=folder, verbose=False)
    assert torch.equal(target.net[0].weight, expected)
    for command in (("inspect", folder), ("verify", folder), ("convert", folder, tmp_path / "a.pt")):
        assert run(*command)[0] == 0
    older = shutil.copy(file, file.with_name("older one.ckpt"))
    os.utime(older, (1, 1))
    with pytest.raises(BrokenCheckpointError, match="is a folder with 2 checkpoints") as refusal:
        load_weights(Lit(), folder)
    named = str(refusal.value).partition("the newest first: ")[2].split(", ")
    assert named == [str(file), str(older)]
    assert all(load_weights(Lit(), path).loaded for path in named)


def test_a_folder_by_hugging_face_leads_to_its_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source, target = nn.Linear(2, 3), nn.Linear(2, 3)
    (tmp_path / "config.json").write_text("{}")
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save([{}], tmp_path / "optimizer.pt")  # as their Trainer leaves it
    assert load_weights(target, tmp_path).path == str(tmp_path / "pytorch_model.bin")
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    assert load_weights(target, tmp_path).path == str(tmp_path / "model.safetensors")
    assert torch.equal(target.weight, source.weight)
