"""Two ranks that train together try at the same time and decide the same."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

SCRIPT = """
import json, os, sys, time
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader, get_worker_info
from trainings import Model, Samples, quiet_trainer
from lightning_gpu_tools import NumWorkersFinder

LOAD_S, STEP_S = 0.016, 0.004
rank = int(os.environ.get("LOCAL_RANK", 0))

class Slow(Samples):
    faulty = False

    def __getitem__(self, index):
        if self.faulty and rank == 1 and get_worker_info():
            raise OSError("only on rank 1")
        return super().__getitem__(index)

class Watch(Callback):
    def __init__(self):
        self.workers, self.batches = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.workers.append(trainer.train_dataloader.num_workers)
        self.batches.append(batch[0, 0].item())

if __name__ == "__main__":
    found = {}
    for mode in ("untouched", "tuned", "faulty"):
        seed_everything(3)
        finder, watch = NumWorkersFinder(budget_s=3.0), Watch()
        dataset = Slow(160, time.sleep, LOAD_S if mode != "untouched" else 0.0)
        dataset.faulty = mode == "faulty"
        model = Model(time.sleep, STEP_S if mode != "untouched" else 0.0)
        callbacks = [watch] if mode == "untouched" else [finder, watch]
        trainer = quiet_trainer(sys.argv[1], callbacks=callbacks, devices=2, strategy="ddp", max_epochs=2)
        trainer.fit(model, DataLoader(dataset, shuffle=True))
        result = finder.result
        found[mode] = {
            "workers": watch.workers,
            "batches": watch.batches,
            "weights": [p.detach().flatten().tolist() for p in model.parameters()],
            "chosen": result and result.settings.num_workers,
            "applied": result and result.applied,
            "reason": result and result.reason,
            "trials": result and [repr(trial) for trial in result.trials],
        }
    with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
        json.dump(found, file)
"""


def test_all_ranks_try_and_decide_the_same(run_python: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = run_python(str(tmp_path / "train.py"), str(tmp_path), env={"PYTHONPATH": path}, timeout=150)
    assert result.returncode == 0, result.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for name in ("workers", "chosen", "applied", "reason", "trials"):
        assert ranks[0]["tuned"][name] == ranks[1]["tuned"][name]
        assert name == "trials" or ranks[0]["faulty"][name] == ranks[1]["faulty"][name]
    for rank in ranks:
        assert rank["tuned"]["applied"]
        assert rank["tuned"]["chosen"] >= 2
        assert rank["tuned"]["workers"][-1] == rank["tuned"]["chosen"]
        assert "only on rank 1" in rank["faulty"]["reason"]
        assert rank["faulty"]["chosen"] == 0
        for mode in ("tuned", "faulty"):
            assert rank[mode]["batches"] == rank["untouched"]["batches"]
            assert rank[mode]["weights"] == rank["untouched"]["weights"]
    assert len(re.findall(r"num_workers=0: [\d.]+ batches/s", result.stdout + result.stderr)) == 1  # rank 0 only
