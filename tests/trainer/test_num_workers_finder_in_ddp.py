"""Two ranks that train together change their loaders' settings at the same step, to the same ones."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

SCRIPT = """
import json, os, sys, time
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader
from trainings import Model, Samples, quiet_trainer
from lightning_gpu_tools import NumWorkersFinder

if __name__ == "__main__":
    folder, mode = sys.argv[1:]
    rank = int(os.environ.get("LOCAL_RANK", 0))
    slow = mode != "without"

    class Slow(Samples):
        def __getitem__(self, index):
            if mode == "faulty" and rank == 1 and torch.utils.data.get_worker_info():
                raise OSError("only on rank 1")
            return super().__getitem__(index)

    class Watch(Callback):
        def __init__(self):
            self.workers, self.batches = [], []

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            self.workers.append(trainer.train_dataloader.num_workers)
            self.batches.append(batch[0, 0].item())

    seed_everything(3)
    finder, watch, model = NumWorkersFinder(budget_s=3.0), Watch(), Model(time.sleep, 0.004 if slow else 0.0)
    trainer = quiet_trainer(
        folder, callbacks=[finder, watch] if slow else [watch], devices=2, strategy="ddp", max_epochs=2
    )
    trainer.fit(model, DataLoader(Slow(160, time.sleep, 0.016 if slow else 0.0), shuffle=True))
    result = finder.result
    with open(f"{folder}/{mode}-{rank}.json", "w") as file:
        json.dump({
            "workers": watch.workers,
            "batches": watch.batches,
            "weights": [p.detach().flatten().tolist() for p in model.parameters()],
            "found": result and result.settings.num_workers,
            "applied": result and result.applied,
            "reason": result and result.reason,
            "trials": result and [trial.settings.num_workers for trial in result.trials],
        }, file)
"""

Run = Callable[..., "CompletedProcess[str]"]


def train(run_python: Run, tmp_path: Path, mode: str) -> tuple[list[dict[str, Any]], str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = run_python(str(script), str(tmp_path), mode, env={"PYTHONPATH": path}, timeout=150)
    assert result.returncode == 0, result.stderr
    return [
        json.loads((tmp_path / f"{mode}-{rank}.json").read_text()) for rank in range(2)
    ], result.stdout + result.stderr


def test_both_ranks_go_through_the_same_trials_at_the_same_steps(run_python: Run, tmp_path: Path) -> None:
    tuned, output = train(run_python, tmp_path, "with")
    assert tuned[0]["workers"] == tuned[1]["workers"]
    assert tuned[0]["trials"] == tuned[1]["trials"]
    assert len(set(tuned[0]["trials"])) >= 2
    for rank in tuned:
        assert rank["applied"]
        assert rank["found"] >= 2
        assert rank["workers"][-1] == rank["found"]
    assert len(re.findall(r"num_workers=0: [\d.]+ batches/s", output)) == 1  # rank 0 only
    as_usual, _ = train(run_python, tmp_path, "without")
    for rank, usual in zip(tuned, as_usual, strict=True):
        assert rank["batches"] == usual["batches"]
        assert rank["weights"] == usual["weights"]


def test_what_fails_on_one_rank_is_given_up_on_both(run_python: Run, tmp_path: Path) -> None:
    ranks, _ = train(run_python, tmp_path, "faulty")
    assert ranks[0]["trials"] == ranks[1]["trials"]
    for rank in ranks:
        assert "only on rank 1" in rank["reason"]
        assert rank["found"] == 0
        assert not rank["applied"]
        assert len(rank["batches"]) == 160
