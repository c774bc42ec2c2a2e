"""The Temporal Fusion Transformer of pytorch-forecasting, on series generated as in its examples."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import pytorch as pl
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from pytorch_forecasting.data.examples import generate_ar_data
from pytorch_forecasting.metrics import QuantileLoss

PACKAGE = "pytorch-forecasting"
CHECKPOINT = "checkpoints/last.ckpt"


def train(
    folder: Path,
    parts: dict[str, Any],
    *,
    loader: Mapping[str, Any] = {},
    resume: str | None = None,
    epochs: int = 2,
) -> None:
    series = generate_ar_data(n_series=40, timesteps=300, seasonality=10.0, trend=3.0, noise=0.1)
    series["series"] = series["series"].astype(str)
    cutoff = series["time_idx"].max() - 20
    training = TimeSeriesDataSet(
        series[series["time_idx"] <= cutoff],
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        static_categoricals=["series"],
        time_varying_unknown_reals=["value"],
        target_normalizer=GroupNormalizer(groups=["series"]),
        max_encoder_length=60,
        max_prediction_length=20,
        add_relative_time_idx=True,
    )
    validation = TimeSeriesDataSet.from_dataset(training, series, min_prediction_idx=cutoff + 1)
    model = TemporalFusionTransformer.from_dataset(
        training, learning_rate=0.03, hidden_size=16, attention_head_size=2, dropout=0.1, loss=QuantileLoss()
    )
    checkpoints = pl.callbacks.ModelCheckpoint(folder / "checkpoints", save_last=True)
    trainer = pl.Trainer(
        default_root_dir=folder,
        logger=pl.loggers.CSVLogger(folder),
        max_epochs=epochs,
        gradient_clip_val=0.1,
        **{**parts, "callbacks": [checkpoints, *parts.get("callbacks", [])]},
    )
    trainer.fit(
        model,
        training.to_dataloader(train=True, batch_size=64, **loader),
        validation.to_dataloader(train=False, batch_size=64, **loader),
        ckpt_path=resume,
        weights_only=False,
    )


def load(file: Path) -> torch.nn.Module:
    return TemporalFusionTransformer.load_from_checkpoint(file, weights_only=False)
