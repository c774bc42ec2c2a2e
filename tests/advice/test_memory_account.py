"""The use of a GPU's memory by part, on synthetic readings."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpu_tools.advice.memory_account import PARTS, MemoryAccount, accounts
from lightning_gpu_tools.gpus.metrics import GpuSample
from lightning_gpu_tools.gpus.readings import GpuProcess
from lightning_gpu_tools.memory.readings import MemoryHoldings, MemoryReading, RankMemory, StepMemory

GIB = 2**30


def reading(allocated: float, *, reserved: float = 24.0, in_pieces: float = 0.0) -> MemoryReading:
    """Return what torch counts, in GiB."""
    return MemoryReading(
        allocated_bytes=int(allocated * GIB),
        reserved_bytes=int(reserved * GIB),
        peak_reserved_bytes=int(reserved * GIB),
        inactive_split_bytes=int(in_pieces * GIB),
    )


# 3 GiB of parameters and as much of gradients, 6 of Adam's states, 1 of a metric, and a peak of 20 in backward.
RANK = RankMemory(
    latest=reading(13),
    gpu=(0, 0, "GPU-0"),
    before_training=reading(3),
    holdings=MemoryHoldings(
        parameters_bytes=3 * GIB, gradients_bytes=3 * GIB, gradients_kept_bytes=3 * GIB, optimizer_bytes=6 * GIB
    ),
    last_step=StepMemory(step=9, begin=reading(13), middle=reading(18), end=reading(13)),
    peak_phase="backward",
    peaks_bytes={"before_training": 3 * GIB, "training": 20 * GIB},
)
OWN = GpuProcess(pid=1, memory_used_bytes=25 * GIB)
OTHER = GpuProcess(pid=2, memory_used_bytes=10 * GIB, user="ada", name="python")
DRIVER = GpuSample(
    uuid="GPU-0",
    time_s=0.0,
    values={
        "memory_total_bytes": 80 * GIB,
        "memory_used_bytes": int(35.5 * GIB),
        "driver_memory_bytes": GIB // 2,
    },
    processes=(OWN, OTHER),
)


def account_of(ranks: list[RankMemory], own_pids: set[int] | None = {1}, **driver: Any) -> MemoryAccount:  # noqa: B006
    first, *others = ranks
    pids = None if own_pids is None else tuple(own_pids)
    (account,) = accounts([replace(first, samples=(replace(DRIVER, **driver),), own_pids=pids), *others])
    return account


def in_gib(account: MemoryAccount) -> dict[str, float]:
    return {name: size / GIB for name, size in account.parts_bytes.items()}


TENSORS = {"parameters": 3, "gradients": 3, "optimizer_states": 6, "other_tensors": 1, "activations": 7}
TORCH = {**TENSORS, "cache_reusable": 4}


def test_every_part_of_the_memory_is_named() -> None:
    account = account_of([RANK])
    assert in_gib(account) == {**TORCH, "context": 1, "other_processes": 10, "driver": 0.5}
    assert (account.used_bytes, account.free_bytes) == (35.5 * GIB, 44.5 * GIB)
    assert account.explained_share == 1
    assert [(one.user, one.name, one.used_bytes) for one in account.others] == [("ada", "python", 10 * GIB)]


@pytest.mark.parametrize(
    ("driver", "beyond_torch"),
    [
        # A container: the numbers of processes are the host's.
        ({"own_pids": None}, {"context": 1, "other_processes": 10, "driver": 0.5}),
        # A container that does not see all processes, or two that may be ours.
        ({"own_pids": None, "processes": (OWN,)}, {"driver": 0.5, "unexplained": 11}),
        # WSL: no memory of processes.
        ({"processes": (OWN._replace(memory_used_bytes=None),)}, {"driver": 0.5, "unexplained": 11}),
        # Sampled before torch took what it has now; nothing said (an integrated GPU).
        ({"values": {"memory_used_bytes": 8 * GIB}}, {}),
    ],
)
def test_memory_without_a_known_owner_stays_unexplained(driver: dict[str, Any], beyond_torch: dict[str, float]) -> None:
    account = account_of([RANK], **driver)
    assert in_gib(account) == {**TORCH, **beyond_torch}
    assert (account.explained_share is None) == (not beyond_torch)


@pytest.mark.parametrize(("peak_phase", "gradients"), [("forward", 1), ("backward", 3)])
def test_forward_has_the_gradients_that_the_last_step_left(peak_phase: str, gradients: int) -> None:
    assert RANK.holdings is not None
    holdings = replace(RANK.holdings, gradients_kept_bytes=GIB)
    parts = in_gib(account_of([replace(RANK, holdings=holdings, peak_phase=peak_phase)]))
    assert parts["gradients"] == gradients


def test_pieces_between_tensors_are_told_from_whole_segments() -> None:
    assert RANK.last_step is not None
    step = replace(RANK.last_step, middle=reading(18, in_pieces=1.5))
    parts = in_gib(account_of([replace(RANK, last_step=step)]))
    assert (parts["cache_fragmented"], parts["cache_reusable"]) == (1.5, 2.5)


def held(now: float, peak: float, *, before: float = 0.0) -> int:
    """Return the peak in GiB of what torch held in a training, by two steps, of which the first held 20 GiB."""
    latest = replace(reading(4, reserved=now), peak_reserved_bytes=int(peak * GIB))
    first = StepMemory(step=1, begin=reading(4, reserved=20), end=reading(4, reserved=20))
    last = StepMemory(step=2, begin=latest, end=latest)
    rank = replace(RANK, latest=latest, before_training=reading(0, reserved=before), first_step=first, last_step=last)
    return (account_of([rank]).peak_reserved_bytes or 0) // GIB


def test_the_reserved_peak_outlasts_the_cache_and_is_this_runs() -> None:
    assert held(24, 24) == 24
    assert held(8, 30) == 30  # the program has emptied the cache
    assert held(24, 70, before=70) == 24  # a search for the largest batch had all of the GPU
    assert held(8, 8) == 20  # the program has reset the peak
    assert account_of([RANK, RANK]).peak_reserved_bytes == 48 * GIB


sizes = st.integers(0, 2**40)
readings = st.builds(MemoryReading, **dict.fromkeys(MemoryReading.__dataclass_fields__, sizes))
holdings = st.builds(MemoryHoldings, **dict.fromkeys(MemoryHoldings.__dataclass_fields__, sizes))
steps = st.builds(StepMemory, step=st.just(1), begin=readings, middle=readings, end=readings)
phases = st.sampled_from(["before_training", "training", "validation"])
ranks = st.builds(
    RankMemory,
    latest=readings,
    gpu=st.just((0, 0, "GPU-0")),
    holdings=st.none() | holdings,
    earlier_bytes=sizes,
    last_step=st.none() | steps,
    peak_phase=st.sampled_from(["", "forward", "backward"]),
    peaks_bytes=st.dictionaries(phases, sizes),
)
processes = st.builds(GpuProcess, pid=st.integers(1, 5), memory_used_bytes=st.none() | sizes)
drivers = st.builds(
    GpuSample,
    uuid=st.just("GPU-0"),
    time_s=st.just(0.0),
    values=st.dictionaries(
        st.sampled_from(["memory_total_bytes", "memory_used_bytes", "driver_memory_bytes"]), st.integers(0, 2**43)
    ),
    processes=st.none() | st.lists(processes, max_size=4).map(tuple),
)
pids = st.none() | st.sets(st.integers(1, 5), max_size=3)


@settings(max_examples=25)
@given(drivers, pids, st.lists(ranks, min_size=1, max_size=3))
def test_the_parts_add_up_and_none_is_negative(
    driver: GpuSample, own_pids: set[int] | None, ranks: list[RankMemory]
) -> None:
    own = None if own_pids is None else tuple(own_pids)
    (account,) = accounts([replace(ranks[0], samples=(driver,), own_pids=own), *ranks[1:]])
    assert all(size > 0 for size in account.parts_bytes.values())
    assert account.parts_bytes.keys() <= PARTS.keys()
    reserved = sum(max(rank.latest.reserved_bytes, rank.latest.allocated_bytes) for rank in ranks)
    assert sum(account.parts_bytes.values()) == (reserved if account.used_bytes is None else account.used_bytes)
    assert account.explained_share is None or 0 <= account.explained_share <= 1
