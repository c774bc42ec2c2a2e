"""TiDE of darts, on series that darts generates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from darts.models import TiDEModel
from darts.utils.timeseries_generation import gaussian_timeseries, linear_timeseries, sine_timeseries

PACKAGE = "darts"
LIGHTNING = "pytorch_lightning"
CHECKPOINT = "models/tide/checkpoints/last-epoch=*.ckpt"


def train(folder: Path, parts: dict[str, Any], *, loader: Mapping[str, Any] = {}, epochs: int = 8) -> None:
    series = [
        sine_timeseries(length=600, value_frequency=1 / (20 + i))
        + linear_timeseries(length=600, end_value=i)
        + gaussian_timeseries(length=600, std=0.1)
        for i in range(10)
    ]
    model = TiDEModel(
        input_chunk_length=48,
        output_chunk_length=12,
        batch_size=32,
        n_epochs=epochs,
        random_state=0,
        model_name="tide",
        work_dir=str(folder / "models"),
        save_checkpoints=True,
        force_reset=True,
        pl_trainer_kwargs={"default_root_dir": str(folder), **parts},
    )
    model.fit([one.astype("float32") for one in series], dataloader_kwargs=dict(loader))


def load(file: Path) -> torch.nn.Module:
    return TiDEModel.load_from_checkpoint("tide", str(file.parents[2]), file_name=file.name).model
