"""A loader whose settings change while it is iterated delivers the same and draws the same random numbers."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from lightning_gpu_tools.loaders.random_state import random_state
from lightning_gpu_tools.loaders.settings import settings_of
from lightning_gpu_tools.loaders.switch import Switch
from lightning_gpu_tools.training.run_measurements import LoaderSettings

COUNT = 23


class Numbers(Dataset[torch.Tensor]):
    """Sample i is i, and what else the process that loads it says."""

    def __init__(self, extra: Callable[[], float] = float) -> None:
        self.extra = extra

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self.extra()])


class GlobalShuffle:
    """A batch sampler that shuffles in __iter__, with the global generators, as many people write it."""

    def __init__(self) -> None:
        self.batches = [[i, i + 1] for i in range(0, COUNT - 1, 2)]

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        np.random.shuffle(self.batches)
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "in order": lambda **options: DataLoader(Numbers(), batch_size=2, **options),
    "shuffled": lambda **options: DataLoader(Numbers(), batch_size=2, shuffle=True, **options),
    "no batches": lambda **options: DataLoader(Numbers(), batch_size=None, shuffle=True, **options),
    "a generator": lambda **options: DataLoader(
        Numbers(), batch_size=2, shuffle=True, drop_last=True, generator=generator(), **options
    ),
    "a sampler": lambda **options: DataLoader(
        Numbers(), batch_size=2, sampler=WeightedRandomSampler([1.0] * COUNT, COUNT), **options
    ),
    "a sampler's generator": lambda **options: DataLoader(
        Numbers(), batch_size=2, sampler=RandomSampler(range(COUNT), generator=generator()), **options
    ),
    "a batch sampler": lambda **options: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(range(COUNT)), 3, False), **options
    ),
    "a global shuffle": lambda **options: DataLoader(Numbers(), batch_sampler=GlobalShuffle(), **options),
}
WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "two": {"num_workers": 2},
    "persistent": {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True},
}


def other(workers: int, prefetch_factor: int = 2, persistent: bool = False) -> LoaderSettings:
    return LoaderSettings(
        num_workers=workers,
        prefetch_factor=prefetch_factor if workers else None,
        persistent_workers=persistent and workers > 0,
        pin_memory=False,
    )


def epochs(
    loader: DataLoader[Any], *, limit: int | None = None, at_batch: Callable[[int], None] = lambda i: None
) -> list[Any]:
    """Return the batches of three epochs as lists, and the state of the random numbers after each epoch.

    With a limit only so many batches are taken, as Lightning does it: nobody asks for one more.
    """
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    seen: list[Any] = []
    count = 0
    for _ in range(3):
        iterator = iter(loader)
        batches = []
        while limit is None or len(batches) < limit:
            try:
                batches.append(next(iterator).tolist())
            except StopIteration:
                break
            at_batch(count)
            count += 1
            torch.rand(1)  # a training step draws random numbers, too
        used = [g for g in (loader.generator, getattr(loader.sampler, "generator", None)) if g is not None]
        seen += [batches, random_state(used)]
        del iterator
    return seen


def changing(switch: Switch, plan: dict[int, LoaderSettings]) -> Callable[[int], None]:
    return lambda i: switch.use(plan[i]) if i in plan else None


@pytest.mark.parametrize("limit", [None, 9])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", LOADERS)
def test_changes_in_mid_epoch_change_neither_batches_nor_random_numbers(
    kind: str, workers: str, limit: int | None
) -> None:
    as_usual = epochs(LOADERS[kind](**WORKERS[workers]), limit=limit)
    switch = Switch(LOADERS[kind](**WORKERS[workers]), watched=True)
    switch.length = limit
    plan = {2: other(2), 3: other(0), 6: other(3, 1), 8: switch.users, 13: other(2, persistent=True)}
    assert epochs(switch.loader, limit=limit, at_batch=changing(switch, plan)) == as_usual
    switch.close()
    assert switch.obstacle is None


@settings(max_examples=15)
@given(
    st.sampled_from(sorted(LOADERS)),
    st.sampled_from(sorted(WORKERS)),
    st.dictionaries(
        st.integers(0, 3 * COUNT // 2),
        st.builds(other, st.integers(0, 3), st.integers(1, 3), st.booleans()),
        max_size=5,
    ),
)
def test_any_changes_at_any_moments(kind: str, workers: str, plan: dict[int, LoaderSettings]) -> None:
    as_usual = epochs(LOADERS[kind](**WORKERS[workers]))
    switch = Switch(LOADERS[kind](**WORKERS[workers]))
    assert epochs(switch.loader, at_batch=changing(switch, plan)) == as_usual
    switch.close()


@pytest.mark.parametrize("workers", WORKERS)
def test_with_the_users_settings_the_workers_draw_the_same_random_numbers(workers: str) -> None:
    def load() -> DataLoader[Any]:
        return DataLoader(Numbers(lambda: float(torch.rand(1)) + np.random.rand()), batch_size=4, **WORKERS[workers])

    switch = Switch(load(), watched=True)
    assert epochs(switch.loader) == epochs(load())
    switch.close()


def test_the_training_process_draws_nothing_of_its_own_where_the_users_workers_would_draw() -> None:
    def load() -> DataLoader[Any]:
        return DataLoader(Numbers(lambda: float(torch.rand(1)) + np.random.rand() + random.random()), num_workers=1)

    switch = Switch(load())
    states = epochs(switch.loader, at_batch=changing(switch, {4: other(0)}))[1::2]
    assert states == epochs(load())[1::2]
    switch.close()


def test_new_workers_do_not_repeat_the_random_numbers_of_the_old_ones() -> None:
    switch = Switch(DataLoader(Numbers(lambda: float(torch.rand(1))), num_workers=1))
    seen = epochs(switch.loader, limit=20, at_batch=changing(switch, {4: other(2), 12: other(0)}))
    drawn = [batch[0][1] for batch in seen[0]]
    assert len(set(drawn)) == len(drawn) == 20
    switch.close()


def test_a_sampler_that_draws_as_it_goes_is_seen() -> None:
    sampler = RandomSampler(range(10 * COUNT), replacement=True, num_samples=100, generator=generator())
    switch = Switch(DataLoader(range(10 * COUNT), sampler=sampler, num_workers=1), watched=True)
    list(switch.loader)
    switch.listener = Silent()
    list(switch.loader)
    assert "draws random numbers as it goes" in str(switch.obstacle)
    switch.close()


@pytest.mark.parametrize("what", ["sampler", "dataset"])
def test_what_training_changes_from_batch_to_batch_is_seen(what: str) -> None:
    class Drawing:
        drawn = 0

        def __iter__(self) -> Iterator[int]:
            for _ in range(COUNT):
                self.drawn += 1  # by itself, it may change as it likes
                yield 0

    sampler, dataset = Drawing(), Numbers()
    changed: Any = {"sampler": sampler, "dataset": dataset}[what]
    switch = Switch(DataLoader(dataset, batch_size=None, sampler=sampler), watched=True)
    switch.listener = Silent()
    list(switch.loader)
    assert switch.obstacle is None
    for i, _ in enumerate(switch.loader):
        changed.losses = [i]
    assert f"training changes {what}" in str(switch.obstacle)
    switch.close()


class Silent:
    epochs = 0

    def on_batch(self, *args: object) -> None: ...
    def on_epoch_start(self) -> None:
        self.epochs += 1

    def on_fault(self, *args: object) -> None: ...


class Custom(DataLoader[Any]):
    """A subclass with arguments of its own, which does more than its base while it is iterated."""

    def __init__(self, numbers: Dataset[Any], factor: float) -> None:
        super().__init__(numbers, batch_size=2, shuffle=True, collate_fn=torch.stack, worker_init_fn=print)
        self.factor = factor

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch * self.factor


def test_a_subclass_keeps_its_ways_and_the_users_object_stays_as_it_is() -> None:
    loader = Custom(Numbers(), 3.0)
    as_usual = epochs(Custom(Numbers(), 3.0))
    before = copy.copy(vars(loader))
    switch = Switch(loader)
    assert isinstance(switch.loader, Custom)
    changed = {"num_workers", "prefetch_factor", "_get_iterator"}
    assert epochs(switch.loader, at_batch=changing(switch, {3: other(2)})) == as_usual
    assert switch.iterated
    assert settings_of(switch.loader) == dataclasses.replace(other(2), batch_size=2)
    for name in vars(switch.loader).keys() - changed:
        assert vars(switch.loader)[name] is vars(loader)[name], name
    assert vars(loader) == before
    switch.close()
    assert "_get_iterator" not in vars(switch.loader)
    assert switch.loader.num_workers == 2


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_are_changed_and_measured_too(method: str) -> None:
    switch = Switch(DataLoader(range(24), batch_size=2, num_workers=1, multiprocessing_context=method), watched=True)
    batches = iter(switch.loader)
    seen = []
    for i in range(12):
        seen += next(batches).tolist()
        if i == 3:
            switch.use(other(2))
    assert seen == list(range(24))
    inner = switch.inner
    assert inner is not None
    assert inner.probe is not None
    assert len(inner.probe.wall_s) == len(inner.probe.cpu_s) > 0
    assert inner.probe.start_s is not None
    switch.close()


def test_who_looks_for_the_workers_finds_those_that_deliver_now() -> None:
    switch = Switch(DataLoader(range(24), batch_size=2))
    batches: Any = iter(switch.loader)
    with pytest.raises(AttributeError, match="'Epoch' object has no attribute '_workers'"):
        _ = batches._workers
    next(batches)
    assert not hasattr(batches, "_workers")
    switch.use(other(2))
    next(batches)
    assert len(batches._workers) == 2
    assert batches._task_info
    switch.close()


def test_somebody_else_may_iterate_it_in_the_middle_of_an_epoch() -> None:
    switch = Switch(DataLoader(range(12), batch_size=2))
    switch.use(other(1, persistent=True))
    outer = iter(switch.loader)
    first = [next(outer).tolist() for _ in range(2)]
    assert sum(map(len, switch.loader)) == 12
    assert first + [batch.tolist() for batch in outer] == [[i, i + 1] for i in range(0, 12, 2)]
    switch.close()


def test_a_look_at_a_batch_is_no_epoch() -> None:
    switch = Switch(DataLoader(range(12), batch_size=2))
    heard = switch.listener = Silent()
    seen = []
    for i, batch in enumerate(switch.loader):
        seen += batch.tolist()
        if i in (1, 3):
            assert next(iter(switch.loader)).tolist() == [0, 1]
            assert switch.epoch is not None
            switch.use(other(i))
            assert switch.inner is not None
            assert len(switch.inner.pids) == i
    assert seen == list(range(12))
    assert heard.epochs == 1
    switch.close()


def test_an_epoch_that_somebody_still_holds_is_over_when_that_is_said() -> None:
    switch = Switch(DataLoader(range(12), batch_size=2))
    heard = switch.listener = Silent()
    held = iter(switch.loader)
    next(held)
    switch.end_epoch()
    assert sum(map(len, switch.loader)) == 12
    assert heard.epochs == 2
    switch.close()


def test_where_there_is_more_than_was_said_no_workers_are_started_for_each_batch() -> None:
    switch = Switch(DataLoader(range(24), batch_size=2))
    switch.length = 3
    switch.use(other(1))
    pids = set()
    for _ in switch.loader:
        assert switch.inner is not None
        pids.update(switch.inner.pids)
    assert len(pids) == 2
    switch.close()


def test_what_only_workers_have_comes_back_with_them() -> None:
    loader = DataLoader(range(12), num_workers=1, timeout=77, multiprocessing_context="fork")
    for last, timeout in ((settings_of(loader), 77), (other(0), 0)):
        switch = Switch(loader)
        for i, _ in enumerate(switch.loader):
            if i in (2, 5):
                switch.use({2: other(0), 5: last}[i])
        switch.close()
        assert switch.loader.timeout == timeout
        assert (switch.loader.multiprocessing_context is None) == (timeout == 0)
        assert len(list(switch.loader)) == 12


def test_a_loader_in_the_place_of_another_keeps_its_own_settings_unless_others_were_found() -> None:
    before, after = (Switch(DataLoader(range(12), batch_size=size, num_workers=size)) for size in (1, 2))
    after.follow(before)
    assert after.settings == after.users
    before.use(other(3))
    after.follow(before)
    assert after.settings == dataclasses.replace(other(3), batch_size=2)
