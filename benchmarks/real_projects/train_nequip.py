"""The command `nequip-train` with the configuration of its own tests: copper with a toy potential."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nequip.utils.unittests
import torch
from nequip.scripts.train import main
from nequip.train import EMALightningModule
from nequip.utils.global_state import set_global_state
from omegaconf import OmegaConf

PACKAGE = "nequip"
CHECKPOINT = "last.ckpt"


def train(
    folder: Path,
    parts: dict[str, Any],
    *,
    loader: Mapping[str, Any] = {},
    resume: str | None = None,
    epochs: int = 5,
) -> None:
    os.environ["TEST_VAL_TWO"] = "2"  # read by the configuration
    config = OmegaConf.load(Path(nequip.utils.unittests.__path__[0], "minimal_toy_emt.yaml"))
    config.run = ["train"]
    config.trainer.max_epochs = epochs
    config.data.split_dataset.update(train=100, val=20, test=10)
    config.data.split_dataset.dataset.update(num_frames=130, supercell=[2, 2, 2])
    config.dataloader.update(loader)
    if resume:
        config.ckpt_path = resume
    for name, made in parts.items():
        targets = [{"_target_": f"lightning_gpu_tools.{type(one).__name__}"} for one in made]
        config.trainer[name] = [*config.trainer.get(name, []), *targets]
    OmegaConf.save(config, folder / "toy.yaml")
    sys.argv = ["nequip-train", "-cp", str(folder), "-cn", "toy", f"hydra.run.dir={folder}"]
    main()


def load(file: Path) -> torch.nn.Module:
    set_global_state()
    return EMALightningModule.load_from_checkpoint(file, map_location="cpu", weights_only=False)
