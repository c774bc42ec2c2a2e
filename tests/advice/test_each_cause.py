"""Each file of ``advice/*causes``: what it says of itself, and whether it tells its two examples apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest

from lightning_gpu_tools.advice import causes, memory_causes, stall_causes
from lightning_gpu_tools.advice.cause import AnyCause, Explanation, StallCause
from lightning_gpu_tools.advice.causes import CAUSES
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.examples import STEP, gpu_run
from lightning_gpu_tools.advice.memory_causes import MEMORY_CAUSES
from lightning_gpu_tools.advice.stall_causes import STALL_CAUSES
from lightning_gpu_tools.advice.stalls import explain_process, explain_ranks
from lightning_gpu_tools.training.stall_facts import RankFacts, StallFacts

Facts = StallFacts | Sequence[RankFacts]
TRAINING = gpu_run(STEP, 95.0)


@pytest.mark.parametrize(
    ("folder", "known"), [(causes, CAUSES), (memory_causes, MEMORY_CAUSES), (stall_causes, STALL_CAUSES)]
)
def test_a_file_is_named_as_its_cause(folder: ModuleType, known: Mapping[str, AnyCause]) -> None:
    for name, cause in known.items():
        assert getattr(folder, name).__doc__.startswith(f"{name}: ")
        assert set(cause.after) <= {*known}


@pytest.mark.parametrize("name", CAUSES)
def test_a_run_with_the_cause_has_it_first_and_a_similar_run_has_not(name: str) -> None:
    cause = CAUSES[name]
    first = diagnose(cause.sick).findings[0]
    assert first.cause == name
    assert first.evidence.get("kind", "") in {shape.kind for shape in cause.shapes}
    assert name not in {finding.cause for finding in diagnose(cause.healthy).findings}


@pytest.mark.parametrize("name", [name for name, cause in CAUSES.items() if cause.needs])
def test_a_cause_is_not_judged_without_what_it_needs(name: str) -> None:
    sick = CAUSES[name].sick
    for need in CAUSES[name].needs:
        part, _, attribute = need.partition(".")
        unknown = replace(getattr(sick, part), **{attribute: None}) if attribute else None
        found = diagnose(replace(sick, **{part: unknown})).findings
        assert name not in {finding.cause for finding in found}


@pytest.mark.parametrize("name", MEMORY_CAUSES)
def test_an_error_with_the_cause_has_it_first_and_a_similar_one_has_not(name: str) -> None:
    cause = MEMORY_CAUSES[name]
    assert diagnose(TRAINING, out_of_memory=cause.sick).findings[0].cause == name
    assert name not in {finding.cause for finding in diagnose(TRAINING, out_of_memory=cause.healthy).findings}


def explained(facts: Facts) -> Explanation | None:
    return explain_process(facts) if isinstance(facts, StallFacts) else explain_ranks(facts)


def applies(cause: StallCause, facts: Facts) -> bool:
    """Return whether a cause finds itself, whatever is judged before it."""
    find = cause.find if isinstance(facts, StallFacts) else cause.find_among_ranks
    return find is not None and find(facts) is not None


def before(name: str) -> set[str]:
    """Return a cause and those that are always judged before it."""
    return {name, *(earlier for one in STALL_CAUSES[name].after for earlier in before(one))}


@pytest.mark.parametrize("name", STALL_CAUSES)
def test_a_stall_with_the_cause_has_it_and_a_similar_one_has_not(name: str) -> None:
    sick, healthy = explained(STALL_CAUSES[name].sick), explained(STALL_CAUSES[name].healthy)
    assert sick is not None
    assert sick.cause == name
    assert all((sick.why, sick.next_step))
    assert healthy is None or healthy.cause != name


@pytest.mark.parametrize("name", STALL_CAUSES)
def test_no_chance_decides_between_two_causes_that_apply(name: str) -> None:
    for facts in (STALL_CAUSES[name].sick, STALL_CAUSES[name].healthy):
        found = [name for name, cause in STALL_CAUSES.items() if applies(cause, facts)]
        assert all(earlier in before(later) for earlier, later in pairwise(found))
