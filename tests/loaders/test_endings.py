"""Endings of trainings: nothing is left, no process, no open file, no iterator; and they take bounded time."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from loader_switching import CHANGES, LOADERS, SwitchAt, arguments, train
from rank_processes import run_ranks
from torch.utils.data import DataLoader, get_worker_info
from trainings import Model, Raise, Samples, quiet_trainer

from lightning_gpu_tools import NumWorkersFinder

ITERATORS = ("_MultiProcessingDataLoaderIter", "_SingleProcessDataLoaderIter", "Pass")


# How long torch waits here for one worker whose iterator was dropped in a reference cycle. It is 5 s, which a machine
# that is busy may take for the rest, too.
STALL_S = 60.0


def open_files() -> set[tuple[str, str]]:
    """Return the descriptors, without the shared memory of a last batch, which the frames of an exception keep."""
    links = {link.name: os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    return {(fd, name) for fd, name in links.items() if "/dev/shm/" not in name and "/proc/" not in name}


def iterators() -> set[int]:
    return {id(thing) for thing in gc.get_objects() if type(thing).__name__ in ITERATORS}


@pytest.mark.parametrize("end", ["a limit", "an exception"])
def test_nothing_is_left_without_the_garbage_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", STALL_S)
    before, after = CHANGES[3]
    gc.collect()
    gc.disable()
    try:
        files, alive, began_s = open_files(), iterators(), time.monotonic()
        callbacks = [SwitchAt(0, 4, after), *([Raise(at_step=13)] if end == "an exception" else [])]
        options = {"limit_train_batches": 6} if end == "a limit" else {}
        train(LOADERS["shuffled"](**arguments(before)), *callbacks, folder=tmp_path, **options)
        took_s = time.monotonic() - began_s
        assert not multiprocessing.active_children()
        assert not iterators() - alive
        until_s = time.monotonic() + STALL_S
        while open_files() - files and time.monotonic() < until_s:
            time.sleep(0.01)  # threads of the queues close their pipes a little later
        assert not open_files() - files
        assert took_s < STALL_S
    finally:
        gc.enable()


def interrupt_search(folder: Path, rank: int) -> None:
    """Press Ctrl-C in a trial; say how the training ended."""
    home = os.getpid()

    class Interrupting(Samples):
        def __getitem__(self, index: int) -> torch.Tensor:
            if get_worker_info() and index % 7 == 0:
                os.kill(home, signal.SIGINT)
                time.sleep(0.2)
            return super().__getitem__(index)

    trainer = quiet_trainer(folder, callbacks=[NumWorkersFinder()])
    try:
        trainer.fit(Model(time.sleep, 0.004), DataLoader(Interrupting(200, time.sleep, 0.016)))
        ended = "as usual"
    except BaseException as error:  # noqa: BLE001 - Ctrl-C itself
        ended = type(error).__name__
    print(json.dumps([ended, trainer.global_step, len(multiprocessing.active_children())]))


def test_ctrl_c_during_the_search_ends_the_training_as_always(tmp_path: Path) -> None:
    (result,) = run_ranks(tmp_path, interrupt_search, ranks=1)
    assert result.returncode == 0, result.stderr
    assert "Exception ignored" not in result.stderr
    ended, steps, children = json.loads(result.stdout.splitlines()[-1])
    assert ended in ("SystemExit", "KeyboardInterrupt")
    assert (steps, children) == (25, 0)
