"""Workers end when who started them says so, at once and all of them, and not when the garbage collector runs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info
from trainings import Samples

from lightning_gpu_tools.loaders import inner_loader
from lightning_gpu_tools.loaders.switch import Switch
from lightning_gpu_tools.training.run_measurements import LoaderSettings

Run = Callable[..., "CompletedProcess[str]"]

# The collector is off: what waits for it is still there when a training is over.
HEAD = """
import gc, json, os, signal, sys, time
from multiprocessing.util import Finalize
gc.disable()
import psutil
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from lightning.pytorch import Callback
from trainings import Model, Samples, quiet_trainer
from lightning_gpu_tools import GPUUtilizationMonitor, NumWorkersFinder, find_loader_settings
from lightning_gpu_tools.loaders.switch import Switch

LOAD_S, STEP_S = 0.02, 0.005
folder, me = sys.argv[1], psutil.Process()

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def left(before):
    began_s = time.monotonic()
    while descriptors() > before and time.monotonic() < began_s + 10:
        time.sleep(0.01)  # threads of the queues close their pipes a little later
    return {
        "children": len(me.children(recursive=True)),
        "iterators": sum(isinstance(thing, _MultiProcessingDataLoaderIter) for thing in gc.get_objects()),
        "descriptors": descriptors() - before,
    }
"""
NOTHING = {"children": 0, "iterators": 0, "descriptors": 0}

A_FIT = """
class Lasting(Samples):
    def __getitem__(self, index):
        if get_worker_info() and not hasattr(self, "end"):
            self.end = Finalize(None, time.sleep, [0.3], exitpriority=1)  # as one that closes a large file
        return super().__getitem__(index)

sys.modules["matplotlib"] = None  # drawing the report would leave fonts open
before = descriptors()
finder = NumWorkersFinder(budget_s=2.0)
trainer = quiet_trainer(folder, callbacks=[GPUUtilizationMonitor(), finder], max_epochs=2)
trainer.fit(
    Model(time.sleep, STEP_S),
    DataLoader(Lasting(180, time.sleep, LOAD_S), shuffle=True),
    DataLoader(Samples(20), num_workers=1),
)
print(json.dumps({
    "left": left(before),
    "trials": [[trial.settings.num_workers, repr(trial.settings)] for trial in finder.result.trials],
}))
"""

OTHERS = """
def garbage():
    switch = Switch(DataLoader(Samples(100), num_workers=2))
    cycle = [iter(switch.loader)]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    pid = os.fork()
    if not pid:
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    alive = [child for child in me.children() if child.status() != psutil.STATUS_ZOMBIE]
    gc.collect()
    return len(alive)

def interrupted():
    class Interrupt(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.train_dataloader.num_workers:
                armed.append(index)

    def after_fork():
        # Where Ctrl-C is most likely to come during the start of a worker, and where Python ignores exceptions.
        if armed:
            armed[:] = []
            signal.raise_signal(signal.SIGINT)

    armed = []
    os.register_at_fork(after_in_parent=after_fork)
    finder = NumWorkersFinder(budget_s=2.0)
    trainer = quiet_trainer(folder, callbacks=[finder, Interrupt()])
    try:
        trainer.fit(Model(time.sleep, STEP_S), DataLoader(Samples(400, time.sleep, LOAD_S)))
    except SystemExit:
        return trainer.global_step < 400

scenes = {
    "search": lambda: find_loader_settings(DataLoader(Samples(200, time.sleep, LOAD_S)), STEP_S, budget_s=1.0).seconds,
    "garbage": garbage,
    "interrupted": interrupted,
}
found = {}
for name, scene in scenes.items():
    before, began_s = descriptors(), time.monotonic()
    said = scene()
    took_s = time.monotonic() - began_s
    found[name] = [said, left(before), took_s]
    gc.collect()
print(json.dumps(found))
"""


def run_script(run_python: Run, folder: Path, script: str) -> dict[str, Any]:
    (folder / "script.py").write_text(HEAD + script)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = run_python(str(folder / "script.py"), str(folder), env={"PYTHONPATH": path})
    assert result.returncode == 0, result.stderr
    for sign in ("Traceback", "Exception ignored", "Error"):
        assert sign not in result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_a_fit_leaves_nothing_behind_and_its_report_shows_our_endings(run_python: Run, tmp_path: Path) -> None:
    found = run_script(run_python, tmp_path, A_FIT)
    assert found["left"] == NOTHING
    endings = sum(trial[0] > 0 and trial != following for trial, following in pairwise(found["trials"]))
    assert endings
    (path,) = tmp_path.rglob("gpu_report.json")
    phase_s = json.loads(path.read_text())["phase_s"]
    assert phase_s["monitoring/NumWorkersFinder"] >= 0.3 * endings


def test_a_search_garbage_and_ctrl_c_leave_nothing_behind(run_python: Run, tmp_path: Path) -> None:
    found = run_script(run_python, tmp_path, OTHERS)
    search_s, left, took_s = found["search"]
    assert left == NOTHING
    assert took_s < search_s + 5  # one ending that stalls takes as long
    workers_in_use, left, _ = found["garbage"]
    assert left == NOTHING
    assert workers_in_use == 2  # a forked process has not ended them
    stopped, left, _ = found["interrupted"]
    assert left == NOTHING
    assert stopped


class Stuck(Samples):
    """Hangs in a worker at the second sample, and does not hear that it is to end."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() and index:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        return super().__getitem__(index)


def test_a_stuck_worker_is_killed_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_END_TIMEOUT_S", "_SIGNAL_TIMEOUT_S"):
        monkeypatch.setattr(inner_loader, name, 0.2)
    switch = Switch(DataLoader(Stuck(10), num_workers=3))
    batches = iter(switch.loader)
    next(batches)
    assert switch.inner is not None
    workers = [psutil.Process(pid) for pid in switch.inner.pids]
    began_s = time.monotonic()
    try:
        switch.close()
        assert time.monotonic() - began_s < 4  # torch itself takes 5 s for each, and does not get rid of it
        assert not any(worker.is_running() for worker in workers)
    finally:
        for worker in workers:
            if worker.is_running():  # or this process could not end
                worker.kill()


def test_who_drops_an_iteration_ends_its_workers() -> None:
    switch = Switch(DataLoader(Samples(10), num_workers=2))
    batches = iter(switch.loader)
    next(batches)
    assert switch.inner is not None
    workers = [psutil.Process(pid) for pid in switch.inner.pids]
    del batches
    assert not any(worker.is_running() for worker in workers)


def test_an_iteration_goes_on_after_its_workers_were_ended() -> None:
    switch = Switch(DataLoader(Samples(10), num_workers=2))
    batches = iter(switch.loader)
    seen = [int(next(batches)[0, 0]) for _ in range(3)]
    switch.end_epoch()
    switch.use(LoaderSettings(num_workers=1, prefetch_factor=2, persistent_workers=False, pin_memory=False))
    assert switch.inner is None
    seen += [int(batch[0, 0]) for batch in batches]
    assert seen == list(range(10))
    switch.close()
