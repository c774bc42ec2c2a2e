"""The command `chemprop train`, which caches graphs by default."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chemprop.cli.main import main
from train_chemprop import load, write_csv

__all__ = ["load", "train"]

PACKAGE = "chemprop"
CHECKPOINT = "chemprop/model_0/checkpoints/last.ckpt"


def train(folder: Path, parts: dict[str, Any], *, loader: Mapping[str, Any] = {}, epochs: int = 6) -> None:
    if parts:
        raise ValueError("chemprop train has no argument for callbacks or plugins")
    write_csv(folder / "molecules.csv", 2000)
    command = ["chemprop", "train", "-i", str(folder / "molecules.csv"), "-o", str(folder / "chemprop")]
    workers = ["--num-workers", str(loader["num_workers"])] if loader else []
    sys.argv = [*command, "--epochs", str(epochs), "--pytorch-seed", "0", *workers]
    main()
