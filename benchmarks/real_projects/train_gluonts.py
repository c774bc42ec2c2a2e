"""DeepAR of GluonTS, on series that GluonTS generates. They are streamed, so there is no num_workers setting."""

from pathlib import Path
from typing import Any

import torch
from gluonts.dataset.artificial import ComplexSeasonalTimeSeries
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator

PACKAGE = "gluonts"
CHECKPOINT = "lightning_logs/version_0/checkpoints/*.ckpt"


def series() -> ComplexSeasonalTimeSeries:
    return ComplexSeasonalTimeSeries(num_series=50, prediction_length=24, length_low=300, length_high=400)


def estimator(**options: Any) -> DeepAREstimator:
    return DeepAREstimator(freq=series().metadata.freq, prediction_length=24, trainer_kwargs=options)


def train(folder: Path, parts: dict[str, Any], *, cache_data: bool = False, epochs: int = 8) -> None:
    data = ListDataset(series().train, freq=series().metadata.freq)
    deepar = estimator(max_epochs=epochs, default_root_dir=folder, **parts)
    deepar.train(data, cache_data=cache_data).serialize(folder)


def load(file: Path) -> torch.nn.Module:
    module = estimator().create_lightning_module()
    module.load_state_dict(torch.load(file)["state_dict"])  # as GluonTS does after training
    return module
