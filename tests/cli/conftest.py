"""A checkpoint for commands."""

from pathlib import Path

import pytest
import torch
from checkpoint_files import Tied, lightning_checkpoint, wrapped

from lightning_gpu_tools.checkpoints.writing import write_checkpoint


@pytest.fixture
def net() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def last(net: Tied, tmp_path: Path) -> str:
    write_checkpoint(lightning_checkpoint(wrapped(net)), tmp_path / "last.ckpt")
    return str(tmp_path / "last.ckpt")
