"""Ranking is a function of readings, claims and requirements; every law of the contract is stated here."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.gpus.readings import GpuClaim, GpuProcess, GpuReading, GpuWaiter
from lightning_gpu_tools.selection.ranking import (
    Candidate,
    Ranking,
    Request,
    attainable,
    best_set,
    effective_free_bytes,
    rank_gpus,
)

GIB = 2**30
MIB = 2**20
PYTHON = GpuProcess(pid=7, name="python", user="bob")
OWN = 4711  # a process of the job itself


def gpu(index: int, free: int | None = 40 * GIB, utilization: float | None = 0.0, **fields: Any) -> GpuReading:
    fields = {"uuid": f"GPU-{index}", "memory_total_bytes": 80 * GIB, "processes": (), **fields}
    return GpuReading(index=index, memory_free_bytes=free, utilization_percent=utilization, **fields)


def claim(*uuids: str, kind: Any = "whole", memory: int | None = None, **fields: Any) -> GpuClaim:
    fields = {"job": "j", "pid": 4182, "user": "alice", "owner_id": 1000, "hostname": "node7", "since_s": 0.0, **fields}
    return GpuClaim(uuids=uuids, kind=kind, memory_bytes=memory, **fields)


def order(ranking: Ranking) -> list[int]:
    return [candidate.gpu.index for candidate in ranking.candidates]


def rank(gpus: list[GpuReading], claims: tuple[GpuClaim, ...] = (), **requirements: Any) -> Ranking:
    return rank_gpus(gpus, claims, Request(**requirements))


def reasons(ranking: Ranking) -> str:
    return "\n".join(map(str, ranking.rejections))


def test_idle_gpus_rank_by_free_memory_then_the_higher_index() -> None:
    free_mib = [10362, 10058, 9990, 9990]
    assert order(rank([gpu(i, free=mib * MIB) for i, mib in enumerate(free_mib)])) == [0, 1, 3, 2]


@pytest.mark.parametrize(
    ("first", "second", "claimed", "expected"),
    [
        pytest.param((70, 99), (5, 3), [], [1, 0], id="idle-before-busy"),
        pytest.param((50, 9.9), (40, 0), [], [0, 1], id="just-not-busy"),
        pytest.param((50, 10.0), (40, 0), [], [1, 0], id="busy-from-ten-percent"),
        pytest.param((70, None), (1, 99), [], [1, 0], id="busy-before-unknown"),
        pytest.param((None, 0), (1, 99), ["GPU-1"], [1, 0], id="unknown-memory-last"),
        pytest.param((70, 0), (5, 0), ["GPU-0", "GPU-0", "GPU-1"], [1, 0], id="fewer-claims-first"),
    ],
)
def test_tiers_come_before_memory(first: Any, second: Any, claimed: list[str], expected: list[int]) -> None:
    gpus = [gpu(i, None if gib is None else gib * GIB, load) for i, (gib, load) in enumerate((first, second))]
    assert order(rank(gpus, tuple(map(claim, claimed)))) == expected


@pytest.mark.parametrize(
    ("free", "used", "process_ids", "effective"),
    [(40, 20, {11, 12}, 30), (40, 20, {99}, 10), (10, 50, {11}, 10)],
    ids=["used already", "not of this job", "more than was claimed"],
)
def test_claimed_memory_is_not_free_until_it_is_used(
    free: int, used: int, process_ids: set[int], effective: int
) -> None:
    running = GpuProcess(pid=11, memory_used_bytes=used * GIB), GpuProcess(pid=12)
    holder = claim("GPU-0", kind="memory", memory=30 * GIB, process_ids=frozenset(process_ids))
    assert effective_free_bytes(gpu(0, free=free * GIB, processes=running), [holder]) == effective * GIB


@pytest.mark.parametrize(
    ("reading", "requirements"),
    [
        pytest.param(gpu(0, free=8 * GIB), {"min_free": 8 * GIB}, id="to the byte"),
        pytest.param(gpu(0, processes=(GpuProcess(pid=7, graphics_only=True),)), {"exclusive": True}, id="a desktop"),
        pytest.param(gpu(0, processes=(GpuProcess(pid=OWN),)), {"exclusive": True}, id="the own process"),
        pytest.param(gpu(0, compute_mode="exclusive_process"), {}, id="an unused GPU in exclusive mode"),
    ],
)
def test_what_just_meets_a_requirement_can_be_used(reading: GpuReading, requirements: dict[str, Any]) -> None:
    assert order(rank_gpus([reading], (), Request(**requirements), own_process_ids={OWN})) == [0]


@pytest.mark.parametrize(
    ("reading", "requirements", "words"),
    [
        (gpu(2, free=4 * GIB), {"min_free": 8 * GIB}, "4.00 GiB free, asked for 8.00 GiB"),
        (gpu(2, utilization=50.1), {"max_utilization": 50}, "50% busy, asked for at most 50%"),
        (gpu(2, free=None), {"min_free": 8 * GIB}, "does not report its free memory"),
        (gpu(2, error="has fallen off the bus: reboot"), {}, "has fallen off the bus: reboot"),
        (gpu(2, mig_mode=True), {}, "is in MIG mode but has no instance"),
        (gpu(2, uuid="MIG-abc"), {"count": 2}, "NCCL does not support MIG, so it cannot be one of 2"),
        (gpu(2, compute_mode="prohibited"), {}, "PROHIBITED"),
        (gpu(2, compute_mode="exclusive_process", processes=(GpuProcess(pid=7),)), {}, "in use by pid 7"),
        (gpu(2, processes=None), {"exclusive": True}, "its processes cannot be read"),
        (gpu(2, processes=(PYTHON, GpuProcess(pid=8))), {"exclusive": True}, "by python of bob (pid 7) and 1 more"),
        (gpu(2, utilization=97.0), {"exclusive": True}, "97% busy although no process is visible"),
    ],
)
def test_every_rejection_says_why_in_numbers(reading: GpuReading, requirements: dict[str, Any], words: str) -> None:
    ranking = rank([reading], **requirements)
    assert not ranking.candidates
    assert words in reasons(ranking)
    assert "GPU 2 (" in reasons(ranking)


@pytest.mark.parametrize("kind", ["memory", "whole", "exclusive"])
def test_exclusive_needs_a_gpu_that_nobody_claims(kind: Any) -> None:
    reading = gpu(0)
    assert rank([reading], exclusive=True).candidates
    claims = (claim("GPU-0", kind=kind, memory=1),)
    assert "alice (pid 4182)" in reasons(rank([reading], claims, exclusive=True))
    assert bool(rank([reading], claims).candidates) is (kind != "exclusive")


def test_the_best_gpus_are_kept_for_each_who_waits() -> None:
    gpus = [gpu(index, free=(10 + index) * GIB) for index in range(5)]
    waiters = [
        GpuWaiter(name=name, uuids=uuids, requested=requested, pid=99, user=name)
        for name, uuids, requested in (("a", ("GPU-0", "GPU-1", "GPU-3"), 1), ("b", ("GPU-3", "GPU-4", "GPU-1"), 2))
    ]
    ranking = rank_gpus(gpus, (), Request(), ahead=waiters)
    assert order(ranking) == [2, 0]
    kept = sorted((rejection.gpu.index, rejection.reason.split()[2]) for rejection in ranking.rejections)
    assert kept == [(1, "b"), (3, "a"), (4, "b")]


def test_what_would_do_once_others_have_left() -> None:
    full = gpu(0, free=0, utilization=99, processes=(GpuProcess(pid=7),), compute_mode="exclusive_process")
    lost, small, silent = gpu(1, error="lost"), gpu(2, memory_total_bytes=4 * GIB), gpu(3, utilization=None)
    asked = Request(min_free=8 * GIB, max_utilization=5, exclusive=True)
    assert attainable([full, lost, small, silent], asked) == ("GPU-0",)


@pytest.mark.parametrize(("field", "value"), [("count", 0), ("max_utilization", 0.8), ("name", " ")])
def test_an_impossible_requirement_is_refused_with_its_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"got {value!r}"):
        Request(**{field: value}).checked()  # type: ignore[arg-type]


sizes = st.none() | st.integers(0, 80).map(lambda gib: gib * GIB)
percents = st.none() | st.floats(0, 100)
processes = st.none() | st.lists(st.builds(GpuProcess, pid=st.integers(1, 5)), max_size=2).map(tuple)
machines = st.lists(st.tuples(sizes, percents, processes), min_size=1, max_size=4).map(
    lambda rows: [gpu(i, free, percent, processes=some) for i, (free, percent, some) in enumerate(rows)]
)
claim_lists = st.lists(
    st.builds(
        lambda index, kind, gib: claim(f"GPU-{index}", kind=kind, memory=gib * GIB if kind == "memory" else None),
        st.integers(0, 3),
        st.sampled_from(["memory", "whole", "exclusive"]),
        st.integers(0, 80),
    ),
    max_size=4,
).map(tuple)
requirements = st.builds(
    Request,
    min_free=st.none() | st.integers(0, 80).map(lambda gib: gib * GIB),
    max_utilization=st.none() | st.just(0.0) | st.floats(1, 100),
    exclusive=st.booleans(),
)


@given(machines, claim_lists, requirements)
def test_law_the_order_of_the_readings_and_claims_changes_nothing(
    gpus: list[GpuReading], claims: tuple[GpuClaim, ...], asked: Request
) -> None:
    expected = rank_gpus(gpus, claims, asked).candidates
    for shuffled in (gpus[::-1], gpus[1:] + gpus[:1]):
        assert rank_gpus(shuffled, claims[::-1], asked).candidates == expected


@given(machines, claim_lists, requirements)
def test_law_nothing_outside_the_filters_and_nothing_lost(
    gpus: list[GpuReading], claims: tuple[GpuClaim, ...], asked: Request
) -> None:
    ranking = rank_gpus(gpus, claims, asked)
    for candidate in ranking.candidates:
        free = candidate.effective_free_bytes
        percent = candidate.gpu.utilization_percent
        assert asked.min_free is None or (free is not None and free >= asked.min_free)
        assert asked.max_utilization is None or (percent is not None and percent <= asked.max_utilization)
        assert not any(claim.kind == "exclusive" and candidate.gpu.uuid in claim.uuids for claim in claims)
        assert not asked.exclusive or all(one.graphics_only for one in candidate.gpu.processes)
    assert sorted(order(ranking) + [rejection.gpu.index for rejection in ranking.rejections]) == list(range(len(gpus)))


# Sets of GPUs: equal models, then links, then nodes, then memory, but never before a filter or a tier


def candidates(
    *free_gib: float, busy: tuple[int, ...] = (), claimed: tuple[int, ...] = (), names: tuple[str | None, ...] = ()
) -> list[Candidate]:
    made = [
        Candidate(
            gpu=GpuReading(
                index=i,
                uuid=f"GPU-{i:02}",
                name=names[i] if names else None,
                utilization_percent=50.0 if i in busy else 0.0,
            ),
            effective_free_bytes=int(gib * GIB),
            whole_claims=int(i in claimed),
        )
        for i, gib in enumerate(free_gib)
    ]
    return sorted(made, key=lambda one: one.order)


RING = [(0, 1), (1, 2), (2, 3), (0, 3)]
CLIQUE = list(itertools.combinations((4, 5, 6, 7), 2))
A, B = "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 2080 Ti"
SETS: dict[str, tuple[list[Candidate], list[tuple[int, int]], tuple[int, ...], bool, list[int]]] = {
    "joined-before-freer": (candidates(40, 10, 39, 38), [(0, 1), (2, 3)], (), False, [2, 3]),
    "one-node-before-freer": (candidates(40, 30, 39, 38), [], (0, 0, 1, 1), False, [2, 3]),
    "joined-before-one-node": (candidates(40, 30, 39, 38), [(0, 2)], (0, 0, 1, 1), False, [0, 2]),
    "the-most-joined": (candidates(*[40] * 4, *[20] * 4), [*RING, *CLIQUE], (), False, [7, 6, 5, 4]),
    "no-busy-one-for-its-link": (candidates(40, 30, 20, busy=(1,)), [(0, 1)], (), False, [0, 2]),
    "the-only-pair": (candidates(80, 12, 11, 11, names=(A, "K80", B, B)), [], (), True, [3, 2]),
    "joined-pair": (candidates(79, 80, 11, 11, names=(A, A, B, B)), [(2, 3)], (), False, [3, 2]),
    "no-busy-pair": (candidates(80, 11, 11, busy=(1, 2), names=(A, B, B)), [], (), True, [0, 2]),
    "like-the-unclaimed-one": (candidates(80, 11, 70, claimed=(1, 2), names=(A, B, A)), [], (), False, [0, 2]),
    "a-tenth-less-memory-for-a-link": (candidates(41, 40, 36, 36.01), [(2, 3)], (), True, [3, 2]),
    "no-more-than-that": (candidates(41, 40, 35.9, 35.91), [(2, 3)], (), True, [0, 1]),
}


@pytest.mark.parametrize(("made", "joined", "nodes", "memory_matters", "expected"), SETS.values(), ids=SETS)
def test_equal_models_come_before_links_these_before_nodes_and_these_before_memory(
    made: list[Candidate],
    joined: list[tuple[int, int]],
    nodes: tuple[int, ...],
    memory_matters: bool,
    expected: list[int],
) -> None:
    links = [(f"GPU-{one:02}", f"GPU-{other:02}") for one, other in joined]
    numa_nodes = {f"GPU-{index:02}": node for index, node in enumerate(nodes)}
    chosen = best_set(made, len(expected), links, numa_nodes, memory_matters)
    assert [one.gpu.index for one in chosen] == expected
