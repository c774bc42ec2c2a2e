"""Two ranks that train together try at the same time and decide the same."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from loader_switching import Watch, shorten_trials
from rank_processes import run_ranks
from torch.utils.data import DataLoader, get_worker_info
from trainings import Model, Samples, quiet_trainer

from lightning_gpu_tools import NumWorkersFinder

LOAD_S, STEP_S = 0.03, 0.004  # so that workers help on a busy machine, too


class Faulty(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        if os.environ["RANK"] == "1" and get_worker_info():
            raise OSError("only on rank 1")
        return super().__getitem__(index)


def train_each_way(folder: Path, rank: int) -> None:
    shorten_trials()
    found = {}
    for mode in ("untouched", "tuned", "faulty"):
        seed_everything(3)
        finder, watch = NumWorkersFinder(), Watch()
        callbacks: list[Callback] = [watch] if mode == "untouched" else [finder, watch]
        dataset = (Faulty if mode == "faulty" else Samples)(60, time.sleep, LOAD_S if finder in callbacks else 0.0)
        model = Model(time.sleep, STEP_S if finder in callbacks else 0.0)
        trainer = quiet_trainer(folder, callbacks=callbacks, devices=2, strategy="ddp", max_epochs=2)
        trainer.fit(model, DataLoader(dataset, shuffle=True))
        result = finder.result
        found[mode] = {
            "workers": watch.workers,
            "batches": watch.batches,
            "weights": [p.detach().flatten().tolist() for p in model.parameters()],
            "chosen": result and result.settings and result.settings.num_workers,
            "applied": result and result.applied,
            "reason": result and result.reason,
            "trials": result and [repr(trial) for trial in result.trials],
        }
    found["pair"] = {"reason": train_on_a_pair(folder, rank)}
    (folder / f"{rank}.json").write_text(json.dumps(found))


class OfPair(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["one"], batch_idx)


def train_on_a_pair(folder: Path, rank: int) -> str | None:
    """Train on two loaders, of which each rank waits longer for another one."""
    waits_s = {"one": (LOAD_S, LOAD_S / 4), "other": (LOAD_S / 8, LOAD_S / 2)}
    loaders = {key: DataLoader(Samples(60, time.sleep, wait_s[rank])) for key, wait_s in waits_s.items()}
    finder = NumWorkersFinder()
    trainer = quiet_trainer(folder, callbacks=[finder], devices=2, strategy="ddp", max_epochs=1)
    trainer.fit(OfPair(time.sleep, STEP_S), loaders)
    return finder.result and finder.result.reason


def test_all_ranks_try_and_decide_the_same(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, train_each_way)
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for name in ("workers", "chosen", "applied", "reason", "trials"):
        assert ranks[0]["tuned"][name] == ranks[1]["tuned"][name]
        assert name == "trials" or ranks[0]["faulty"][name] == ranks[1]["faulty"][name]
    assert 'The loader is "one" (Samples).' in ranks[0]["pair"]["reason"]
    assert ranks[0]["pair"] == ranks[1]["pair"]
    for rank in ranks:
        assert rank["tuned"]["applied"], rank["tuned"]["reason"]
        assert rank["tuned"]["chosen"] >= 1
        assert rank["tuned"]["workers"][-1] == rank["tuned"]["chosen"]
        assert "only on rank 1" in rank["faulty"]["reason"]
        assert rank["faulty"]["chosen"] == 0
        for mode in ("tuned", "faulty"):
            assert rank[mode]["batches"] == rank["untouched"]["batches"]
            assert rank[mode]["weights"] == rank["untouched"]["weights"]
    said = "".join(one.stderr for one in ended)
    assert said.count("training pauses for at most 30 s to try DataLoader settings") == 3  # of rank 0
