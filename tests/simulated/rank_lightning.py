"""The ranks of a Lightning training: ``ddp``, ``fsdp``, or ``fsdp2`` by Lightning's ModelParallelStrategy."""

import json
import os
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

STRATEGY, RANKS = sys.argv[1], int(os.environ["WORLD_SIZE"])
for rank in range(1, RANKS):
    if os.fork() == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        break


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ["RANK"]))  # so that the ranks begin with different weights
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 2))
        self.weights: list[Any] = []

    def configure_model(self) -> None:
        if STRATEGY == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        if STRATEGY == "ddp":  # which sends those of rank 0 to the others, joined in one tensor
            self.weights = [one.flatten()[:3].tolist() for one in self.layers.parameters()]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layers(batch).sum()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = Trainer(
    accelerator="gpu",
    devices=RANKS,
    strategy=ModelParallelStrategy() if STRATEGY == "fsdp2" else STRATEGY,
    max_steps=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model, DataLoader(torch.randn(16, 32), batch_size=2))
text = trainer.strategy.broadcast("of rank 0" if trainer.is_global_zero else None)
answer = [trainer.global_step, trainer.strategy.root_device.index, trainer.world_size, text, model.weights]
os.write(1, f"\n{json.dumps(answer)}\n".encode())  # at once: the ranks share the pipe
