"""What a run changes in the process is in the table of docs/what_the_monitor_changes.md, and is put back."""

import json
from pathlib import Path

import pytest
import torch
from process_changes import changed, fit_changes, lightnings, snapshot, table
from rank_processes import run_ranks
from trainings import Samples, loader

from lightning_gpu_tools import (
    ExactResume,
    GPUUtilizationAdvisor,
    GPUUtilizationMonitor,
    NumWorkersFinder,
    PortableCheckpointIO,
    watch,
)

# Of the tables about a fit, what only happens with other models, after errors, or for microseconds.
RARE = {
    "SIGCHLD",
    "SIGTERM",  # which Lightning handles as well
    "fit_loop.epoch_loop.manual_optimization.run",
    "gc.isenabled()",
    "lightning-gpu-tools-...",
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


@pytest.mark.filterwarnings("ignore")
def test_every_change_is_in_the_table_and_is_put_back(tmp_path: Path) -> None:
    of_lightning = lightnings(fit_changes(tmp_path))
    before = snapshot({})
    callbacks = [
        GPUUtilizationMonitor(),
        GPUUtilizationAdvisor(min_steps=1, min_seconds=0),
        NumWorkersFinder(budget_s=2.0),
        ExactResume(),
    ]
    plugins = [PortableCheckpointIO()]
    assert changed(before, snapshot({})) == set()

    ours = fit_changes(tmp_path, callbacks, plugins)
    listed = table()
    assert ours.during - of_lightning - listed.keys() == set()
    assert ours.after - of_lightning == set()
    assert listed["train_dataloader"]
    of_fit = table("Every run with the monitor or the advisor", "NumWorkersFinder and ExactResume")
    assert {name for name in of_fit if name not in ours.during} <= RARE


def rank_changes(folder: Path, rank: int) -> None:
    options = {"devices": 2, "strategy": "ddp"}
    of_lightning = lightnings(fit_changes(folder / f"{rank}", **options))
    ours = fit_changes(folder / f"{rank}", [GPUUtilizationMonitor(), GPUUtilizationAdvisor()], **options)
    unlisted, left = ours.during - of_lightning - table().keys(), ours.after - of_lightning
    missing = table("With several ranks").keys() - ours.during - {"hooks of parameters"}  # which are on a GPU alone
    (folder / f"found{rank}").write_text(json.dumps([sorted(unlisted), sorted(left), sorted(missing)]))


def test_the_same_with_two_ranks(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(tmp_path, rank_changes)):
        assert result.returncode == 0, result.stderr
        assert json.loads((tmp_path / f"found{rank}").read_text()) == [[], [], []]


def test_a_loop_of_ones_own_is_left_as_it_was(tmp_path: Path) -> None:
    layer, data = torch.nn.Linear(4, 1), loader(Samples(30))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
    objects = {"module": [layer], "loader": [data]}
    layer(torch.ones(4)).backward()
    optimizer.step()  # torch wraps it the first time
    before = snapshot(objects)
    with watch(folder=str(tmp_path)) as run:
        for batch in run.batches(data):
            layer(batch).sum().backward()
            optimizer.step()
        during = snapshot(objects)
    ours = changed(before, during)
    assert ours - table().keys() == set()
    assert {"torch.autograd.backward", "hooks of all optimizers", "loader._get_iterator", "gc.callbacks"} <= ours
    assert changed(before, snapshot(objects)) == set()
