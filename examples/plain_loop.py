"""Measure a training loop of your own, without Lightning: two added lines, marked below.

    python examples/plain_loop.py                             # one process
    torchrun --nproc-per-node 2 examples/plain_loop.py        # two processes, one report

The example needs no GPU and takes a few seconds.
"""

import os
import tempfile
import time

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools import watch


class FromStorage(Dataset[torch.Tensor]):
    """Samples that take 1 ms each to load, as from a network drive."""

    def __len__(self) -> int:
        return 1_200

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.full((8,), float(index % 10))


def main(folder: str) -> None:
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(FromStorage(), batch_size=16, shuffle=True)

    with watch(folder=folder, min_steps=20, min_seconds=1) as run:  # added
        for _ in range(2):
            for batch in run.batches(loader):  # added
                loss = torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            with run.phase("validation"), torch.no_grad():  # optional: lists validation separately
                model(batch)

    assert run.diagnosis is not None
    print(run.diagnosis.verdict, [finding.cause for finding in run.diagnosis.findings])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
