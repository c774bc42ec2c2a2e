"""Train a small network on real photographs, with every part of lightning_gpu_tools enabled.

    python examples/train.py                      # slow, without workers: read the report
    python examples/train.py --num-workers 2      # follow the report's advice
    python examples/train.py --find-workers       # or find the settings during training

The two classes are scikit-learn's two sample photographs. Each sample is a random crop, decoded from the JPEG file and
augmented, so loading takes time. The network is small, so a step is short, as on a GPU. The test crops are from a part
of the photographs that training never sees.
The example uses the GPUs with the most free memory, or the CPU.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image, ImageEnhance
from sklearn.datasets import load_sample_images
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools import (
    FreeMemoryCUDAAccelerator,
    GPUUtilizationAdvisor,
    GPUUtilizationMonitor,
    NumWorkersFinder,
    PortableCheckpointIO,
    load_weights,
)
from lightning_gpu_tools.units import parse_bytes

CROP, SIZE = 96, 16  # pixels of the photograph, pixels after scaling


class PhotoCrops(Dataset):
    """Random crops of photographs. The class of a crop is its photograph.

    Args:
        columns: The part of each photograph to crop from, as fractions of its width.
        length: Number of crops in an epoch.
    """

    def __init__(self, columns: tuple[float, float], length: int) -> None:
        self.paths = load_sample_images().filenames
        self.columns = columns
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % len(self.paths)
        photo = Image.open(self.paths[label]).convert("RGB")
        random = np.random.default_rng(None if self.columns[0] == 0 else index)  # the same test crops in every epoch
        left = int(random.integers(self.columns[0] * photo.width, self.columns[1] * photo.width - CROP))
        top = int(random.integers(0, photo.height - CROP))
        crop = photo.crop((left, top, left + CROP, top + CROP)).resize((SIZE, SIZE))
        crop = ImageEnhance.Color(crop).enhance(random.uniform(0.0, 1.2))  # color alone must not reveal the class
        crop = ImageEnhance.Brightness(crop).enhance(random.uniform(0.7, 1.3))
        return torch.from_numpy(np.asarray(crop).copy()).permute(2, 0, 1).float() / 255, label


def build_network() -> nn.Module:
    """Return an untrained network, a plain ``nn.Module``."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 64), nn.ReLU(), nn.Linear(64, 2))


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = build_network()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def accuracy(network: nn.Module, crops: PhotoCrops) -> float:
    network.eval()
    with torch.no_grad():
        right = [
            network(image[None]).argmax().item() == label for image, label in (crops[i] for i in range(len(crops)))
        ]
    return sum(right) / len(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="number of GPUs (default: %(default)s)")
    parser.add_argument("--num-workers", type=int, default=0, help="workers of the DataLoader (default: %(default)s)")
    parser.add_argument("--find-workers", action="store_true", help="find the loader's settings with NumWorkersFinder")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="number of epochs (default: %(default)s)")
    parser.add_argument(
        "--min-free", type=parse_bytes, default="1GiB", help="free memory of a GPU (default: %(default)s)"
    )
    args = parser.parse_args()

    seed_everything(0)
    torch.set_num_threads(1)  # so small a network needs no more, and loading needs the other cores
    loader = DataLoader(
        PhotoCrops((0.0, 0.7), length=40 * args.batch_size),
        batch_size=args.batch_size,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        shuffle=True,
    )
    if FreeMemoryCUDAAccelerator.is_available():
        hardware = {"accelerator": FreeMemoryCUDAAccelerator(min_free=args.min_free), "devices": args.devices}
    else:
        hardware = {"accelerator": "cpu", "devices": 1}
    checkpoint = ModelCheckpoint()
    finder = [NumWorkersFinder(budget_s=20)] if args.find_workers else []
    trainer = Trainer(
        **hardware,
        max_epochs=args.epochs,
        callbacks=[GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=5), checkpoint, *finder],
        plugins=[PortableCheckpointIO()],
        default_root_dir=Path("runs"),
        log_every_n_steps=20,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)

    if trainer.is_global_zero:
        network = build_network()
        report = load_weights(network, checkpoint.best_model_path)
        print(report)
        print(f"Accuracy on unseen crops: {accuracy(network, PhotoCrops((0.7, 1.0), length=400)):.1%}")


if __name__ == "__main__":
    main()
