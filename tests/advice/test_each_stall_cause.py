"""Each file of ``advice/stall_causes``: its sick and its healthy example, and what it says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from lightning_gpu_tools.advice import stall_causes
from lightning_gpu_tools.advice.stall_cause import Explanation, StallCause
from lightning_gpu_tools.advice.stall_causes import STALL_CAUSES
from lightning_gpu_tools.advice.stalls import explain_process, explain_ranks
from lightning_gpu_tools.training.stall_facts import RankFacts, StallFacts

EVERY = pytest.mark.parametrize("cause", STALL_CAUSES.values(), ids=STALL_CAUSES)

Facts = StallFacts | Sequence[RankFacts]


def explained(facts: Facts) -> Explanation | None:
    return explain_process(facts) if isinstance(facts, StallFacts) else explain_ranks(facts)


def found(cause: StallCause, facts: Facts) -> Explanation | None:
    """Return what a cause finds by itself, whatever is judged before it."""
    if isinstance(facts, StallFacts):
        return None if cause.find is None else cause.find(facts)
    return None if cause.find_among_ranks is None else cause.find_among_ranks(facts)


def before(name: str) -> set[str]:
    """Return the causes that are always judged before one."""
    return {name, *(earlier for one in STALL_CAUSES[name].after for earlier in before(one))}


@EVERY
def test_the_sick_example_has_it_and_the_healthy_one_has_not(cause: StallCause) -> None:
    sick, healthy = explained(cause.sick), explained(cause.healthy)
    assert sick is not None
    assert sick.cause == cause.name
    assert all((sick.why, sick.next_step))
    assert healthy is None or healthy.cause != cause.name


@EVERY
def test_no_chance_decides_between_two_causes_that_hold(cause: StallCause) -> None:
    for facts in (cause.sick, cause.healthy):
        holding = [other.name for other in STALL_CAUSES.values() if found(other, facts) is not None]
        assert all(earlier in before(later) for earlier, later in pairwise(holding))


@EVERY
def test_a_file_is_named_as_its_cause(cause: StallCause) -> None:
    file: ModuleType = getattr(stall_causes, cause.name)
    assert file.CAUSE is cause
    assert (file.__doc__ or "").startswith(f"{cause.name}: ")
    assert set(cause.after) <= {*STALL_CAUSES}


def test_every_file_is_a_cause() -> None:
    assert {path.stem for path in Path(stall_causes.__path__[0]).glob("*.py")} == {*STALL_CAUSES, "__init__"}
