"""The facts in the entries of all ranks, as JSON brings them."""

from __future__ import annotations

import json
import math
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from lightning_gpu_tools.runs.rank_entries import Received, received

LINE = {"phase": "training_step/forward", "file": "train.py", "line": 7, "function": "training_step", "samples": 40}


def entry(rank: int, own_step_s: float = 0.1, **facts: Any) -> dict[str, Any]:
    own = {
        "own_step_s": own_step_s,
        "phase_s": {"forward": own_step_s},
        "own_s_over_time": [own_step_s] * 4,
        "steps_over_time": 20,
        "wait_s": None,
        "gpu": rank % 2,
    }
    published = {"rank": rank, "node": rank // 2, "own_step": own, "lines": [LINE], **facts}
    return json.loads(json.dumps(published))  # type: ignore[no-any-return]


def test_until_two_ranks_have_steady_steps_there_is_nothing_to_compare() -> None:
    assert received([], 0) == Received()
    assert received([entry(0), entry(1, own_step=None)], 0).ranks == ()
    assert [one.rank for one in received([entry(0), entry(1)], 0).ranks] == [0, 1]


@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=12))
def test_of_any_ranks_at_most_the_slowest_has_its_lines(own_steps_s: list[float]) -> None:
    ranks = received([entry(rank, own_step_s) for rank, own_step_s in enumerate(own_steps_s)], 0).ranks
    with_lines = [one for one in ranks if one.lines]
    assert len(with_lines) <= 1
    assert all(math.isclose(one.own_step_s, max(own_steps_s)) for one in with_lines)


def test_a_rank_that_is_clearly_slower_has_its_lines() -> None:
    ranks = received([entry(0), entry(1, 0.2), entry(2)], 0).ranks
    assert [[line.line for line in one.lines] for one in ranks] == [[], [7], []]
