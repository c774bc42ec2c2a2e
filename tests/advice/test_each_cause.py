"""Each file of ``advice/causes``: what it says of itself, and whether it tells its two examples apart."""

from dataclasses import replace
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import pytest
from cause_examples import MEMORY_EXAMPLES, STALL_EXAMPLES, TIME_EXAMPLES

from lightning_gpu_tools.advice.causes import MEMORY_CAUSES, STALL_CAUSES, TIME_CAUSES, memory, stalls, time
from lightning_gpu_tools.advice.diagnosis import diagnose, explain_stall


@pytest.mark.parametrize(
    ("folder", "known", "examples"),
    [
        (time, TIME_CAUSES, TIME_EXAMPLES),
        (memory, MEMORY_CAUSES, MEMORY_EXAMPLES),
        (stalls, STALL_CAUSES, STALL_EXAMPLES),
    ],
)
def test_each_cause_has_a_place_in_the_order_its_own_file_and_examples(
    folder: ModuleType, known: dict[str, Any], examples: dict[str, Any]
) -> None:
    assert {module.name for module in iter_modules(folder.__path__)} == {*known} == {*examples}
    names = [*known]
    for place, (name, cause) in enumerate(known.items()):
        assert getattr(folder, name).__doc__.startswith(f"{name}: ")
        assert {*cause.silences} <= {*names[place + 1 :]}


@pytest.mark.parametrize("name", TIME_CAUSES)
def test_the_cause_comes_first_for_a_sick_run_only(name: str) -> None:
    sick, healthy = TIME_EXAMPLES[name]
    first = diagnose(sick).findings[0]
    assert first.cause == name
    assert first.evidence.get("kind", "") in {variant.kind for variant in TIME_CAUSES[name].variants}
    assert name not in {finding.cause for finding in diagnose(healthy).findings}


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("cpu_contention", "cores.wait_share"),
        ("thermal_throttling", "gpu.held_clock_percent"),
        *(("power_cap", f"gpu.{name}") for name in ("power_capped_percent", "held_clock_percent", "power_limit_watts")),
    ],
)
def test_a_cause_is_not_found_without_what_it_needs(name: str, need: str) -> None:
    sick = TIME_EXAMPLES[name].sick
    part, attribute = need.split(".")
    unknown = replace(getattr(sick, part), **{attribute: None})
    found = diagnose(replace(sick, **{part: unknown})).findings
    assert name not in {finding.cause for finding in found}


@pytest.mark.parametrize("name", MEMORY_CAUSES)
def test_the_cause_comes_first_for_a_sick_error_only(name: str) -> None:
    (sick, error), (healthy, similar) = MEMORY_EXAMPLES[name]
    assert diagnose(sick, out_of_memory=error).findings[0].cause == name
    assert name not in {finding.cause for finding in diagnose(healthy, out_of_memory=similar).findings}


@pytest.mark.parametrize("name", STALL_CAUSES)
def test_the_cause_is_found_for_a_sick_stall_only(name: str) -> None:
    sick, healthy = map(explain_stall, STALL_EXAMPLES[name])
    assert sick.cause == name
    assert all((sick.why, sick.advice))
    assert healthy.cause != name
