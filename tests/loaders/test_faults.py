"""Settings that do not work are given up: nothing is lost, nothing comes twice, and the user's own errors stay."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loader_switching import settings
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools.loaders import passes
from lightning_gpu_tools.loaders.passes import continued
from lightning_gpu_tools.types import LoaderSettings

IN_ORDER = list(range(40))


class Act(Dataset[int]):
    """A dataset whose sample i is i; at one of them, the worker that loads it does something."""

    def __init__(self, action: Callable[[], object], at: int = 9) -> None:
        self.action, self.at, self.home = action, at, os.getpid()

    def __len__(self) -> int:
        return len(IN_ORDER)

    def __getitem__(self, index: int) -> Any:
        if index == self.at and os.getpid() != self.home:
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


def test_a_fault_under_other_settings_goes_back_to_the_original_ones(switch_later: Callable[..., list[int]]) -> None:
    said = r"OSError: cannot be loaded here.* original settings were restored"
    with pytest.warns(UserWarning, match=said) as warned:
        seen = switch_later(DataLoader(Act(fall), batch_size=None), settings(2, persistent=True), epochs=2)
    assert seen == IN_ORDER * 2
    assert len([one for one in warned if "original settings" in str(one.message)]) == 1


def test_a_worker_that_hangs_is_not_waited_for_for_ever(
    switch_later: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "MAX_BATCH_S", 0.5)
    began_s = time.monotonic()
    with pytest.warns(UserWarning, match="timed out after 0.5 seconds"):
        assert switch_later(DataLoader(Act(lambda: time.sleep(1000)), batch_size=None), settings(2)) == IN_ORDER
    assert time.monotonic() - began_s < 60  # the item alone takes 1,000


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
