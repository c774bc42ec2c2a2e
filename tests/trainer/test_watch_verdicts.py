"""A loop of one's own is diagnosed as the same training is under a Trainer: trainings of benchmarks/toys.py."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from diagnosis_suite import in_words
from toys import TOYS, Slow, Toy

from lightning_gpu_tools import watch
from lightning_gpu_tools.types import TrainingWatch

# Toy -> how many steps show it. Their labels are what the diagnosis suite demands under a Trainer.
STEPS = {
    "a2": 60,
    "another loader": 60,
    "e": 52,
    "f": 100,
    "g": 10,
    "short epochs": 120,
    "b": 60,
    "c": 60,
    "d": 60,
}


def train(toy: Toy, run: TrainingWatch, fabric: Any, steps: int) -> None:
    """Do what the Trainer does with a toy, in a loop of one's own."""
    model = toy.model()
    (optimizer,) = [model.configure_optimizers()]
    callbacks, loader = [make() for make in toy.callbacks], toy.loader()
    left = iter(range(steps))
    while True:
        for batch in run.batches(loader):
            step = next(left, None)
            if step is None:
                return
            optimizer.zero_grad()
            model.training_step(batch, step).backward()
            optimizer.step()
            if fabric is not None:
                fabric.log("loss", 0.0, step=step)
            if toy.validate and step % toy.options["val_check_interval"] == 0:
                with run.phase("validation"):
                    for number, one in enumerate(DataLoader(Slow(length=4))):
                        model.validation_step(one, number)
            for callback in callbacks:
                if toy.known == "checkpoint":
                    with run.phase("checkpoint"):
                        model.on_save_checkpoint({})
                else:
                    callback.on_train_batch_end(None, model, None, batch, step)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STEPS)
def test_a_loop_has_the_trainers_verdict(tmp_path: Path, name: str) -> None:
    toy = TOYS[name]
    logger = toy.options.get("logger")
    gc.collect()  # what earlier tests have left would be this training's garbage
    fabric = None if logger is None else Fabric(accelerator="cpu", devices=1, loggers=[logger(tmp_path)])
    with watch(fabric, folder=str(tmp_path), min_steps=20, min_seconds=0) as run:
        train(toy, run, fabric, STEPS[name])
    assert run.diagnosis is not None
    known = "callback code after optimizer.step()" if toy.known == "callback SlowCallback" else toy.known
    assert in_words(run.diagnosis) == known, run.diagnosis.why
    texts = [run.diagnosis.why, run.diagnosis.next_step, *(one.advice for one in run.diagnosis.findings)]
    assert not any("Trainer" in text or "NumWorkersFinder" in text for text in texts)
