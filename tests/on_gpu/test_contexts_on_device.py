"""CUDA contexts on GPUs that are not their rank's: none of them is ours."""

import json
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from torch.utils.data import DataLoader
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, load_report, watch

pytestmark = pytest.mark.usefixtures("two_gpus")


def train_on_the_second(folder: Path, rank: int) -> None:
    """Train a loop on GPU 1 without making it the current one, then with a Trainer; write where contexts were made."""
    has_context = torch._C._cuda_hasPrimaryContext
    layer = torch.nn.Linear(4, 1).to("cuda:1")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
    with watch(folder=str(folder / "loop"), min_seconds=0.01) as run:
        for batch in run.batches(DataLoader(Samples(400), batch_size=1, num_workers=1, pin_memory=True)):
            layer(batch.to("cuda:1")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    trainer = quiet_trainer(folder / "fit", accelerator="gpu", devices=[1], callbacks=[GPUUtilizationMonitor()])
    trainer.fit(Model(), loader(Samples(400), batch_size=1))
    (folder / "contexts.json").write_text(json.dumps([has_context(0), has_context(1)]))


def test_we_make_no_context_on_another_gpu(tmp_path: Path) -> None:
    (result,) = run_ranks(tmp_path, train_on_the_second, ranks=1)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "contexts.json").read_text()) == [False, True]
    for name in ("loop", "fit"):
        report = load_report(tmp_path / name)
        assert [gpu.index for gpu in report.gpus] == [1]
        assert report.gpu_step_s["training_step/forward"] > 0  # by events on that GPU
        assert not report.unseen
