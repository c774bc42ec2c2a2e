"""Each file of ``advice/*causes``: what it says of itself, and whether it tells its two examples apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import pytest

from lightning_gpu_tools.advice import causes, memory_causes, stall_causes
from lightning_gpu_tools.advice.cause import AnyCause
from lightning_gpu_tools.advice.causes import CAUSES
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.examples import STEP, gpu_run
from lightning_gpu_tools.advice.memory_causes import MEMORY_CAUSES
from lightning_gpu_tools.advice.stall_causes import STALL_CAUSES
from lightning_gpu_tools.advice.stalls import explain

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


@pytest.mark.parametrize("name", STALL_CAUSES)
def test_a_stall_with_the_cause_has_it_and_a_similar_one_has_not(name: str) -> None:
    sick = explain(STALL_CAUSES[name].sick)
    assert sick.cause == name
    assert all((sick.why, sick.next_step))
    assert explain(STALL_CAUSES[name].healthy).cause != name
