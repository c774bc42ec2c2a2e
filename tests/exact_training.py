"""A training that resumes where it was killed, and prints a digest of its weights at the end.

``python exact_training.py FOLDER RANKS WORKERS [STEP RANK SIGNAL]``: it sends itself the signal at that step.
"""

import hashlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools import ExactResume

folder, ranks, workers, *kill = sys.argv[1:]


class Photos(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return (index + random.random() + np.random.randn() + torch.rand(4)).float() / 40


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean() * (1 + random.random())

    def on_train_batch_end(self, *args: Any) -> None:
        step, rank, number = map(int, kill or (1000, 0, 0))
        if (self.global_step, self.global_rank) == (step, rank):
            os.kill(os.getpid(), number)
        if self.global_step >= step:
            time.sleep(0.3)  # the ranks have seconds to agree before the training ends

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(Photos(), batch_size=2, shuffle=True, num_workers=int(workers))


if __name__ == "__main__":
    pl.seed_everything(random.randrange(1000) if list(Path(folder).glob("*.ckpt")) else 5)
    saving = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=3, save_last=True)
    trainer = pl.Trainer(
        default_root_dir=folder,
        callbacks=[ExactResume(), saving],
        accelerator="cpu",
        devices=int(ranks),
        strategy="ddp" if int(ranks) > 1 else "auto",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, ckpt_path="last")
    if trainer.is_global_zero:
        weights = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
        print("ENDED", hashlib.sha256(weights).hexdigest(), trainer.global_step)
