"""Sets of GPUs: equal models, then links, then nodes, then memory, but never before a filter or a tier."""

from __future__ import annotations

import itertools

import pytest

from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.selection.ranking import Candidate, best_set

GIB = 2**30


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


def nvlinks(*pairs: tuple[int, int]) -> list[tuple[str, str]]:
    return [(f"GPU-{a:02}", f"GPU-{b:02}") for a, b in pairs]


def nodes(*numbers: int | None) -> dict[str, int | None]:
    return {f"GPU-{i:02}": number for i, number in enumerate(numbers)}


def chosen(
    made: list[Candidate], count: int, links: list[tuple[str, str]], numa: dict[str, int | None], **kw: bool
) -> list[int]:
    return [one.gpu.index for one in best_set(made, count, links, numa, **{"memory_matters": False, **kw})]


RING = [(0, 1), (1, 2), (2, 3), (0, 3)]
CLIQUE = list(itertools.combinations((4, 5, 6, 7), 2))


@pytest.mark.parametrize(
    ("made", "count", "links", "numa", "expected"),
    [
        pytest.param(candidates(40, 10, 39, 38), 2, [(0, 1), (2, 3)], (), [2, 3], id="joined-before-freer"),
        pytest.param(candidates(40, 30, 39, 38), 2, [], (0, 0, 1, 1), [2, 3], id="one-node-before-freer"),
        pytest.param(candidates(40, 30, 39, 38), 2, [(0, 3)], (0, 1, 1, 0), [0, 3], id="joined-on-one-node"),
        pytest.param(candidates(40, 30, 39, 38), 2, [(0, 2)], (0, 0, 1, 1), [0, 2], id="joined-before-one-node"),
        pytest.param(candidates(*[40] * 4, *[20] * 4), 4, [*RING, *CLIQUE], (), [7, 6, 5, 4], id="the-most-joined"),
        pytest.param(candidates(40, 30, 20, busy=(1,)), 2, [(0, 1)], (), [0, 2], id="no-busy-one-for-its-link"),
        pytest.param(candidates(40, 30, 20, claimed=(1,)), 2, [(0, 1)], (), [0, 2], id="no-claimed-one-for-its-link"),
    ],
)
def test_links_come_before_nodes_and_these_before_memory(
    made: list[Candidate], count: int, links: list[tuple[int, int]], numa: tuple[int | None, ...], expected: list[int]
) -> None:
    assert chosen(made, count, nvlinks(*links), nodes(*numa)) == expected


A, B = "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 2080 Ti"


@pytest.mark.parametrize(
    ("made", "count", "links", "memory_matters", "expected"),
    [
        pytest.param(candidates(80, 12, 11, 11, names=(A, "K80", B, B)), 2, [], True, [2, 3], id="the-only-pair"),
        pytest.param(candidates(79, 80, 11, 11, names=(A, A, B, B)), 2, [(2, 3)], False, [2, 3], id="joined-pair"),
        pytest.param(candidates(80, 11, 11, busy=(1, 2), names=(A, B, B)), 2, [], True, [0, 2], id="no-busy-pair"),
        pytest.param(
            candidates(80, 11, 70, claimed=(1, 2), names=(A, B, A)), 2, [], False, [0, 2], id="like-the-unclaimed-one"
        ),
        pytest.param(candidates(80, 40, 39, names=(A, None, None)), 2, [], False, [0, 1], id="unknown-is-no-model"),
    ],
)
def test_equal_models_come_before_links(
    made: list[Candidate], count: int, links: list[tuple[int, int]], memory_matters: bool, expected: list[int]
) -> None:
    assert sorted(chosen(made, count, nvlinks(*links), {}, memory_matters=memory_matters)) == expected


@pytest.mark.parametrize(("gib", "expected"), [(36.0, [2, 3]), (35.9, [0, 1])], ids=["a-tenth-less", "more-than-that"])
def test_a_link_costs_at_most_a_tenth_of_the_memory(gib: float, expected: list[int]) -> None:
    made = candidates(41, 40, gib, gib + 0.01)
    assert sorted(chosen(made, 2, nvlinks((2, 3)), {}, memory_matters=True)) == expected


def test_the_order_of_links_and_equal_candidates_changes_nothing() -> None:
    links = nvlinks((0, 1), (2, 3), (1, 2))
    made = candidates(40, 40, 40, 40)
    assert {tuple(chosen(made, 2, list(some), {})) for some in itertools.permutations(links)} == {(3, 2)}
