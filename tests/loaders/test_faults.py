"""Settings that do not work are given up: nothing is lost, nothing comes twice, and the user's own errors stay his."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from lightning_gpu_tools.loaders import switch as switch_module
from lightning_gpu_tools.loaders.switch import Switch
from lightning_gpu_tools.training.run_measurements import LoaderSettings

IN_ORDER = list(range(40))


def workers(count: int) -> LoaderSettings:
    return LoaderSettings(
        num_workers=count, prefetch_factor=2 if count else None, persistent_workers=False, pin_memory=False
    )


class Heard:
    """What a listener is told."""

    def __init__(self) -> None:
        self.faults: list[tuple[int, str]] = []

    def on_batch(self, batch: Any, wait_s: float, since_last_s: float | None) -> None: ...
    def on_epoch_start(self) -> None: ...

    def on_fault(self, settings: LoaderSettings, error: Exception) -> None:
        self.faults.append((settings.num_workers, str(error)))


class Act(Dataset[int]):
    """Sample i is i; at one of them the process that loads it does something."""

    def __init__(self, action: Callable[[], object], at: int = 9) -> None:
        self.action, self.at, self.home = action, at, os.getpid()

    def __len__(self) -> int:
        return len(IN_ORDER)

    def __getitem__(self, index: int) -> int:
        if index == self.at and os.getpid() != self.home:
            self.action()
        return index


def fall() -> None:
    raise OSError("cannot be loaded here")


def touch_cuda() -> None:
    # What torch does in a forked process once CUDA is initialised, without CUDA.
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")


def iterate(switch: Switch, plan: dict[int, LoaderSettings]) -> list[int]:
    seen = []
    for i, batch in enumerate(switch.loader):
        seen.append(int(batch))
        if i in plan:
            switch.use(plan[i])
    return seen


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (fall, "cannot be loaded here"),
        (touch_cuda, "re-initialize CUDA"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL, most likely by the kernel because memory ran out"),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), "SIGBUS, most likely because /dev/shm is full"),
        (lambda: os._exit(3), "exit code 3"),
    ],
)
def test_a_fault_under_other_settings_goes_back_to_the_users_own(action: Callable[[], object], said: str) -> None:
    switch = Switch(DataLoader(Act(action), batch_size=None))
    heard = switch.listener = Heard()
    assert iterate(switch, {3: workers(2)}) == IN_ORDER
    ((count, reason),) = heard.faults
    assert count == 2
    assert said in reason
    assert switch.settings == switch.users
    switch.close()


def a_training_step_in_which_a_worker_dies(switch: Switch) -> None:
    assert switch.inner is not None
    os.kill(switch.inner.pids[0], signal.SIGKILL)
    # Until it is dead, and it stays in the process table: torch's handler of SIGCHLD looks for it there.
    os.waitid(os.P_PID, switch.inner.pids[0], os.WEXITED | os.WNOWAIT)
    # The kernel may have given the signal to another thread; Python's handlers run in this one.
    signal.raise_signal(signal.SIGCHLD)


@pytest.fixture
def torch_hears_of_dead_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sets its handler of SIGCHLD once a process, and Lightning takes it away again at the end of a fit."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@pytest.mark.usefixtures("torch_hears_of_dead_workers")
def test_a_worker_that_is_killed_during_a_training_step_does_not_break_the_step() -> None:
    switch = Switch(DataLoader(range(len(IN_ORDER)), batch_size=None, num_workers=1))
    heard = switch.listener = Heard()
    seen = []
    for i, batch in enumerate(switch.loader):
        seen.append(int(batch))
        if i == 3:
            switch.use(workers(2))
        if i == 10:
            a_training_step_in_which_a_worker_dies(switch)
    assert seen == IN_ORDER
    assert [count for count, _ in heard.faults] == [2]
    assert "SIGKILL" in heard.faults[0][1]
    switch.close()


@pytest.mark.usefixtures("torch_hears_of_dead_workers")
def test_torch_itself_does_break_the_step_with_the_users_own_settings() -> None:
    """The opposite of the test above, without which it would prove nothing."""
    switch = Switch(DataLoader(range(len(IN_ORDER)), batch_size=None, num_workers=2))
    batches = iter(switch.loader)
    assert [next(batches) for _ in range(10)] == IN_ORDER[:10]
    with pytest.raises(RuntimeError, match="killed by signal"):
        a_training_step_in_which_a_worker_dies(switch)


def test_what_spawn_cannot_pickle_is_noticed_when_the_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Switch(DataLoader(Act(lambda: None), batch_size=None))
    heard = switch.listener = Heard()
    monkeypatch.setattr(torch.multiprocessing, "Process", torch.multiprocessing.get_context("spawn").Process)
    assert iterate(switch, {3: workers(2)}) == IN_ORDER
    ((_, reason),) = heard.faults
    assert "pickle" in reason
    switch.close()


@pytest.mark.parametrize("change_at", [0, 3, 6])
def test_a_dataset_that_fails_with_any_settings_fails_as_without_us(change_at: int) -> None:
    class Broken(Act):
        def __getitem__(self, index: int) -> int:
            if index == 9:
                raise KeyError("sample 9 is broken")
            return index

    switch = Switch(DataLoader(Broken(print), batch_size=None))
    batches = iter(switch.loader)
    seen = [next(batches) for _ in range(change_at)]
    switch.use(workers(2))
    seen += [next(batches) for _ in range(9 - change_at)]
    assert seen == IN_ORDER[:9]  # the batches before it have all come, as without workers
    with pytest.raises(KeyError, match="sample 9 is broken") as caught:
        next(batches)
    assert "in DataLoader worker process" not in str(caught.value)
    switch.close()


def test_a_fault_of_the_search_itself_does_not_end_the_training() -> None:
    class Clumsy(Heard):
        def on_batch(self, batch: Any, wait_s: float, since_last_s: float | None) -> None:
            if int(batch) == 5:
                switch.use(workers(2))
                raise ZeroDivisionError("ours")

    switch = Switch(DataLoader(range(len(IN_ORDER)), batch_size=None))
    switch.listener = Clumsy()
    with pytest.warns(UserWarning, match="keeps its settings, because of a fault in the search: ZeroDivisionError"):
        assert iterate(switch, {}) == IN_ORDER
    assert switch.settings == switch.users
    switch.close()


def test_a_worker_that_cannot_hand_its_batch_over_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unsendable(Act):
        def __getitem__(self, index: int) -> Any:
            return index if os.getpid() == self.home else lambda: index

    monkeypatch.setattr(switch_module, "_PATIENCE_S", 0.5)
    switch = Switch(DataLoader(Unsendable(print), batch_size=None))
    heard = switch.listener = Heard()
    assert iterate(switch, {3: workers(2)}) == IN_ORDER
    ((_, reason),) = heard.faults
    assert reason == "no batch came from the worker processes for 0.5 s"
    switch.close()


def test_a_worker_that_died_between_epochs_costs_no_batch() -> None:
    switch = Switch(DataLoader(range(len(IN_ORDER)), batch_size=None))
    heard = switch.listener = Heard()
    switch.use(dataclasses.replace(workers(2), persistent_workers=True))
    assert [int(batch) for batch in switch.loader] == IN_ORDER
    assert switch._kept is not None
    os.kill(switch._kept.pids[0], signal.SIGKILL)
    assert [int(batch) for batch in switch.loader] == IN_ORDER
    assert len(heard.faults) == 1
    switch.close()
