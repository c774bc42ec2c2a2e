"""What a run changes in the process is in the table of docs/what_the_monitor_changes.md, and is put back."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from process_changes import Snapshot, changed, of_trainer, snapshot, table
from torch.utils.data import get_worker_info
from trainings import Boom, Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import (
    ExactResume,
    GPUUtilizationAdvisor,
    GPUUtilizationMonitor,
    NumWorkersFinder,
    PortableCheckpointIO,
)

STEPS, SEEN_AT = 50, 40
# Of the tables about a fit, what only happens with other models, after errors, or for microseconds.
RARE = {
    "SIGCHLD",
    "SIGTERM",  # which Lightning handles as well
    "fit_loop.epoch_loop.manual_optimization.run",
    "gc.isenabled()",
    "lightning-gpu-tools-...",
    "numpy.random.get_bit_generator()",  # where the finder has not taken the loading to workers
    "strategy.backward",
    "strategy.load_checkpoint",
    "strategy.optimizer_step",
    "strategy.predict_step",
    "strategy.test_step",
    "strategy.precision_plugin.backward",
    "strategy.precision_plugin.clip_gradients",
    "strategy.precision_plugin.scaler.scale",
    "strategy.precision_plugin.scaler.unscale_",
    "strategy.precision_plugin.scaler.update",
    "sys.getswitchinterval()",
    "temporary folders",
    "torch.compile",
    "validate_loop._on_evaluation_epoch_start",
}

_looks: list[Callable[[], None]] = []  # take a snapshot; not in the dataset, into which the finder looks


class Seen(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == SEEN_AT + 1 and get_worker_info() is None:
            _looks[-1]()
        time.sleep(0.005)
        return super().__getitem__(index)


class Looking(Model):
    """Takes snapshots in a step, in validation, in tests, and while a checkpoint is saved."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)
        if batch_idx == SEEN_AT:
            _looks[-1]()
        if batch_idx == STEPS - 1 and self.fails:
            raise Boom("at the end")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        _looks[-1]()
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        _looks[-1]()


class Changes(NamedTuple):
    during: set[str]
    after: set[str]


def changes(folder: Path, callbacks: list[Any], plugins: list[Any], *, fails: bool) -> Changes:
    """Return what differs in snapshots during and after a fit and a validation, from the state before."""
    trainer = quiet_trainer(
        folder,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=SEEN_AT), *callbacks],
        plugins=plugins,
        logger=CSVLogger(folder),
        enable_checkpointing=True,
        val_check_interval=STEPS - 5,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    seen: list[Snapshot] = []
    before = snapshot(of_trainer(trainer))
    _looks.append(lambda: seen.append(snapshot(of_trainer(trainer))))
    model, training, validation = Looking(fails=fails), loader(Seen(STEPS)), loader(Samples(1))
    with pytest.raises(Boom) if fails else nullcontext():
        trainer.fit(model, training, validation)
    if not fails:
        trainer.validate(model, validation)
    return Changes(
        {name for one in seen for name in changed(before, one)}, changed(before, snapshot(of_trainer(trainer)))
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_every_change_is_in_the_table_and_is_put_back(tmp_path: Path, fails: bool) -> None:
    alone = changes(tmp_path, [], [], fails=fails)
    # What Lightning does to each callback, it also does to ours.
    lightnings = {
        name.replace("callback.", prefix) for name in alone.during for prefix in ("callback.", "own callback.")
    }
    before = snapshot({})
    callbacks = [
        GPUUtilizationMonitor(),
        GPUUtilizationAdvisor(min_steps=1, min_seconds=0),
        NumWorkersFinder(budget_s=2.0),
        ExactResume(),
    ]
    plugins = [PortableCheckpointIO()]
    assert changed(before, snapshot({})) == set()

    ours = changes(tmp_path, callbacks, plugins, fails=fails)
    listed = table()
    assert ours.during - lightnings - listed.keys() == set()
    assert ours.after - lightnings == ({"train_dataloader"} if fails else set())  # which the validation has let go
    assert listed["train_dataloader"]
    of_fit = table("Every run with the monitor or the advisor", "NumWorkersFinder, ExactResume, PortableCheckpointIO")
    if not fails:
        assert {name for name in of_fit if name not in ours.during} <= RARE
