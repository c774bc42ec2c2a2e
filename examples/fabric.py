"""Measure a training loop with Fabric: two added lines, marked below.

    python examples/fabric.py

The example needs no GPU and takes a few seconds. The report separates backward, the optimizer step, clipping, saving,
and the copy to the device without further code. Fabric's loggers receive the diagnosis.
"""

import tempfile
import time
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools import PortableCheckpointIO, load_weights, watch


class Pictures(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 16, 16), index % 10 / 10)


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(1))


def main(folder: Path) -> None:
    fabric = Fabric(accelerator="auto", devices=1, loggers=[CSVLogger(folder)], plugins=[PortableCheckpointIO()])
    fabric.launch()
    model = make_model()
    model(torch.zeros(1, 3, 16, 16))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(Pictures(), batch_size=10))

    with watch(fabric, min_steps=20, min_seconds=1) as run:  # added
        for step, batch in enumerate(run.batches(loader)):  # added
            loss = (model(batch) - batch.mean((1, 2, 3))[:, None]).square().mean()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                time.sleep(0.1)  # such as drawing a picture: the report finds it
            if step == 50:
                fabric.save(folder / "half.ckpt", {"model": model})

    assert run.diagnosis is not None
    print(run.diagnosis.verdict, [finding.cause for finding in run.diagnosis.findings])
    print(load_weights(model, folder / "half.ckpt"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
