"""The variational autoencoder of scvi-tools, on synthetic cells that it generates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import scvi
import torch

PACKAGE = "scvi-tools"
CHECKPOINT = "model/model.pt"


def cells() -> Any:
    scvi.settings.seed = 0
    cells = scvi.data.synthetic_iid(batch_size=5000, n_genes=1000, sparse_format="csr_matrix")
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    return cells


def train(folder: Path, parts: dict[str, Any], *, loader: Mapping[str, Any] = {}, epochs: int = 8) -> None:
    model = scvi.model.SCVI(cells())
    checkpoints = {"enable_checkpointing": True} if "plugins" in parts else {}
    model.train(
        max_epochs=epochs,
        default_root_dir=folder,
        datasplitter_kwargs=dict(loader),
        check_val_every_n_epoch=5,
        **checkpoints,
        **parts,
    )
    model.save(str(folder / "model"), overwrite=True)


def load(file: Path) -> torch.nn.Module:
    return scvi.model.SCVI.load(file.parent, cells()).module
