"""chemprop's Python API, as in its training notebook. Each epoch builds the graphs of the molecules again."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from chemprop import data, featurizers, models, nn
from lightning import pytorch as pl
from rdkit import Chem, RDConfig
from rdkit.Chem.Crippen import MolLogP

PACKAGE = "chemprop"
CHECKPOINT = "checkpoints/last.ckpt"


def molecules(count: int) -> list[tuple[str, float]]:
    """Return molecules of the National Cancer Institute, which RDKit includes, and their logP."""
    lines = Path(RDConfig.RDDataDir, "NCI", "first_5K.smi").read_text().splitlines()
    smiles = (line.split()[0] for line in lines)
    parsed = ((one, Chem.MolFromSmiles(one)) for one in smiles)
    # chemprop's graphs need at least one bond.
    usable = [(one, MolLogP(molecule)) for one, molecule in parsed if molecule is not None and molecule.GetNumBonds()]
    return usable[:count]


def write_csv(file: Path, count: int) -> None:
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([("smiles", "logp"), *molecules(count)])


def train(
    folder: Path,
    parts: dict[str, Any],
    *,
    loader: Mapping[str, Any] = {},
    resume: str | None = None,
    cache: bool = False,
    epochs: int = 6,
) -> None:
    points = [data.MoleculeDatapoint.from_smi(smiles, [logp]) for smiles, logp in molecules(2000)]
    indices = data.make_split_indices([point.mol for point in points], "random", (0.8, 0.1, 0.1))
    train_points, val_points, _ = data.split_data_by_indices(points, *indices)
    featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
    train_set = data.MoleculeDataset(train_points[0], featurizer)
    scaler = train_set.normalize_targets()
    val_set = data.MoleculeDataset(val_points[0], featurizer)
    val_set.normalize_targets(scaler)
    train_set.cache = val_set.cache = cache

    unscale = nn.UnscaleTransform.from_standard_scaler(scaler)
    ffn = nn.RegressionFFN(output_transform=unscale)
    model = models.MPNN(nn.BondMessagePassing(), nn.MeanAggregation(), ffn, True, [nn.metrics.RMSE()])
    checkpoints = pl.callbacks.ModelCheckpoint(folder / "checkpoints", "best", "val_loss", mode="min", save_last=True)
    trainer = pl.Trainer(
        default_root_dir=folder,
        logger=False,
        max_epochs=epochs,
        deterministic=True,  # as `chemprop train --pytorch-seed` sets it
        **{**parts, "callbacks": [checkpoints, *parts.get("callbacks", [])]},
    )
    trainer.fit(
        model,
        data.build_dataloader(train_set, **loader),
        data.build_dataloader(val_set, shuffle=False, **loader),
        ckpt_path=resume,
        weights_only=False,
    )


def load(file: Path) -> torch.nn.Module:
    return models.MPNN.load_from_checkpoint(file)
