"""A loader that is changed in mid-epoch delivers what it would have: in real trainings, against untouched ones.

At the end of trainings, and of settings that do not work, nothing is left or lost, and they take bounded time.
"""

import functools
import gc
import itertools
import json
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from loader_switching import CHANGES, ITEMS, LOADERS, Drawing, Items, SwitchAt, arguments, assert_equal, settings, train
from rank_processes import run_ranks
from torch.utils.data import DataLoader, Dataset, get_worker_info
from trainings import Model, Raise, Samples, quiet_trainer

from lightning_gpu_tools import NumWorkersFinder
from lightning_gpu_tools.loaders import passes
from lightning_gpu_tools.loaders.passes import continued
from lightning_gpu_tools.loaders.workers import Batches
from lightning_gpu_tools.types import LoaderSettings

POINTS = itertools.cycle([(0, 4), (1, 4), (0, 1), (0, 0)])
# Every kind of loader with one change, and one kind with every change.
CASES = [
    (kind, *change, *next(POINTS)) for change in CHANGES for kind in (LOADERS if change == CHANGES[0] else ["shuffled"])
]


@functools.cache
def untouched(kind: str, before: LoaderSettings) -> Drawing:
    return train(LOADERS[kind](**arguments(before)), folder=Path("."))


@pytest.mark.parametrize(("kind", "before", "after", "epoch", "done"), CASES)
def test_batches_and_random_numbers_are_those_of_an_untouched_fit(
    tmp_path: Path, kind: str, before: LoaderSettings, after: LoaderSettings, epoch: int, done: int
) -> None:
    ours = train(LOADERS[kind](**arguments(before)), SwitchAt(epoch, done, after), folder=tmp_path)
    if kind == "drawing" and not before.num_workers:  # its draws are the workers' now, so later shuffles differ
        assert ours.batches[:9] == untouched(kind, before).batches[:9]
        assert [sorted(itertools.chain(*ours.batches[i : i + 9])) for i in (0, 9, 18)] == [list(range(26))] * 3
        assert ours.numbers != untouched(kind, before).numbers
    else:
        assert_equal(ours, untouched(kind, before))


class Peek(Callback):
    """A callback that logs a batch of the training data in mid-epoch."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 5:
            next(iter(trainer.train_dataloader))


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 6, "reload_dataloaders_every_n_epochs": 1},
        {"peek": True},
        {"validation": DataLoader(ITEMS, 4), "val_check_interval": 3},
        {"accumulate_grad_batches": 2, "max_steps": 7},
    ],
    ids=", ".join,  # the names alone: two processes that share the tests must name them alike
)
def test_what_a_trainer_does_with_its_loader_makes_no_difference(tmp_path: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    peeks = [Peek()] if options.pop("peek", False) else []
    plain = train(LOADERS["shuffled"](), *peeks, folder=tmp_path, **options)
    ours = train(LOADERS["shuffled"](), *peeks, SwitchAt(0, 4, settings(2, True)), folder=tmp_path, **options)
    assert_equal(ours, plain)


def test_living_workers_learn_what_changes_between_epochs(tmp_path: Path) -> None:
    class Epochs(Items):
        epoch = -1.0

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((4,), self.epoch)

    class SetEpoch(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            dataset.epoch = float(trainer.current_epoch)

    dataset = Epochs()
    ours = train(DataLoader(dataset, 13), SetEpoch(), SwitchAt(0, 1, settings(1, persistent=True)), folder=tmp_path)
    assert [batch[0] for batch in ours.batches] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


# Endings


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


def test_a_worker_that_dies_interrupts_a_fetch_and_no_step() -> None:
    batches = Batches(DataLoader(Samples(99), num_workers=2))
    next(batches)
    batches.workers[0].kill()
    multiprocessing.connection.wait([batches.workers[0].sentinel])  # its signal comes
    with pytest.raises(RuntimeError, match=r"^a worker process was killed by SIGKILL"):
        list(batches)
    batches.close()
    assert not multiprocessing.active_children()


# Settings that do not work are given up

IN_ORDER = list(range(40))


class Act(Dataset[int]):
    """A dataset whose sample i is i; a worker that loads sample 9 does something."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action, self.home = action, os.getpid()

    def __len__(self) -> int:
        return len(IN_ORDER)

    def __getitem__(self, index: int) -> Any:
        if index == 9 and os.getpid() != self.home:
            return self.action() or index
        return index


def fall() -> None:
    raise OSError("cannot be loaded here")


@pytest.fixture
def switch_later() -> Iterator[Callable[..., list[int]]]:
    """Iterate over a loader that is changed after some batches, for one epoch or more."""
    made: list[Any] = []

    def iterate(loader: DataLoader[Any], *plan: LoaderSettings, epochs: int = 1) -> list[int]:
        made.append(continued(loader))
        seen = []
        for _ in range(epochs):
            for i, batch in enumerate(made[-1]):
                seen.append(int(batch))
                if i % 4 == 3 and i // 4 < len(plan):
                    made[-1].loading.use(plan[i // 4])
        return seen

    yield iterate
    for loader in made:
        loader.loading.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("act", "said"), [(fall, "OSError: cannot be loaded"), (signal.pause, "timed out after 0.5 s")]
)
def test_a_fault_under_other_settings_goes_back_to_the_original_ones(
    switch_later: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], said: str
) -> None:
    monkeypatch.setattr(passes, "MAX_BATCH_S", 0.5)
    began_s = time.monotonic()
    with pytest.warns(UserWarning, match=rf"{said}.* original settings were restored") as warned:
        seen = switch_later(DataLoader(Act(act), batch_size=None), settings(2, persistent=True), epochs=2)
    assert seen == IN_ORDER * 2
    assert len([one for one in warned if "original settings" in str(one.message)]) == 1
    assert time.monotonic() - began_s < 60


def test_a_dataset_that_fails_with_any_settings_fails_as_without_us() -> None:
    class Broken(Act):
        def __getitem__(self, index: int) -> int:
            if index == 9:
                raise KeyError("sample 9 is broken")
            return index

    made = continued(DataLoader(Broken(print), batch_size=None))
    batches = iter(made)
    seen = [next(batches) for _ in range(6)]
    made.loading.use(settings(2))
    seen += [next(batches) for _ in range(3)]
    assert seen == IN_ORDER[:9]  # the batches before it have all come, as without workers
    with pytest.warns(UserWarning, match="sample 9 is broken"), pytest.raises(KeyError, match="sample 9") as caught:
        next(batches)
    assert "in DataLoader worker process" not in str(caught.value)
    made.loading.close()
