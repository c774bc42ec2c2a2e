"""Save a checkpoint with one set of wrappers, and load it with three others.

    python examples/load_checkpoint_anywhere.py

The example needs no GPU and takes a few seconds.
"""

import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_gpu_tools import PortableCheckpointIO, load_from_checkpoint, load_weights
from lightning_gpu_tools.errors import CheckpointError


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


class SumOfInputs(LightningModule):
    def __init__(self, parallel: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.DataParallel(make_net()) if parallel else make_net()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(folder: Path) -> None:
    # 1. Train with wrappers. The plugin writes keys without wrapper prefixes, and never a partial file.
    trainer = Trainer(max_epochs=2, accelerator="cpu", plugins=[PortableCheckpointIO()], default_root_dir=folder)
    trainer.fit(SumOfInputs(parallel=True), DataLoader(torch.randn(512, 4), batch_size=32))
    checkpoint = folder / "last.ckpt"
    trainer.save_checkpoint(checkpoint)

    # 2. Load into a plain network. The prefix "net." is detected and removed.
    net = make_net()
    print(load_weights(net, checkpoint))

    # 3. Load into a wrapped network. Its prefixes are added.
    print(load_weights(nn.DataParallel(torch.compile(make_net())), checkpoint))

    # 4. Build the LightningModule from the saved hyperparameters, with different wrappers.
    module = load_from_checkpoint(SumOfInputs, checkpoint, parallel=False)
    assert torch.equal(module.net[0].weight, net[0].weight)

    # 5. Ambiguous and truncated files raise errors that name the fix.
    torch.save({"student": net.state_dict(), "teacher": make_net().state_dict()}, folder / "two.pt")
    (folder / "cut.ckpt").write_bytes(checkpoint.read_bytes()[:1000])
    explain(folder / "two.pt")
    explain(folder / "cut.ckpt")


def explain(path: Path) -> None:
    try:
        load_weights(make_net(), path)
    except CheckpointError as error:
        print(error)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
