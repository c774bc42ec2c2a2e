"""Find a DataLoader's settings for your own training loop, without Lightning's Trainer.

    python examples/find_loader_settings.py

The example needs no GPU and takes about ten seconds. With a Trainer, use `Trainer(callbacks=[NumWorkersFinder()])`
instead, as in train.py.
"""

import time

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools import find_loader_settings


class FromStorage(Dataset[torch.Tensor]):
    """Samples that take 2 ms each to load, as from a network drive."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((8,), float(index))


def main() -> None:
    loader = DataLoader(FromStorage(), batch_size=16, shuffle=True)

    # Time some steps on one batch, to exclude loading.
    model, batch = torch.nn.Linear(8, 1), next(iter(loader))
    began_s = time.perf_counter()
    for _ in range(100):
        model(batch).square().mean().backward()
        time.sleep(0.010)  # stands for the rest of a real step
    step_time_s = (time.perf_counter() - began_s) / 100

    found = find_loader_settings(loader, step_time_s, budget_s=8)
    for trial in found.trials:
        print(f"num_workers={trial.settings.num_workers}: {trial.batches_per_s or 0:.1f} batches/s")
    print(found.reason)
    assert found.settings is not None
    loader = DataLoader(
        loader.dataset,
        batch_size=16,
        shuffle=True,
        num_workers=found.settings.num_workers,
        prefetch_factor=found.settings.prefetch_factor,
        persistent_workers=found.settings.persistent_workers,
        pin_memory=found.settings.pin_memory,
    )
    print(f"{len(loader)} batches an epoch, with num_workers={loader.num_workers}")


if __name__ == "__main__":
    main()
