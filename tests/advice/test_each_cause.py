"""Each file of ``advice/causes`` and ``advice/memory_causes``: its two examples, and what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from lightning_gpu_tools.advice import causes, memory_causes
from lightning_gpu_tools.advice.cause import AnyCause, Cause
from lightning_gpu_tools.advice.causes import CAUSES
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.examples import STEP, gpu_run
from lightning_gpu_tools.advice.memory_cause import MemoryCause
from lightning_gpu_tools.advice.memory_causes import MEMORY_CAUSES

EVERY = pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
EVERY_OF_MEMORY = pytest.mark.parametrize("cause", MEMORY_CAUSES.values(), ids=MEMORY_CAUSES)
TRAINING = gpu_run(STEP, 95.0)


@EVERY
def test_the_sick_example_has_it_first_and_the_healthy_one_has_not(cause: Cause) -> None:
    first = diagnose(cause.sick).findings[0]
    assert first.cause == cause.name
    assert first.evidence.get("kind", "") in {shape.kind for shape in cause.shapes}
    assert cause.name not in {finding.cause for finding in diagnose(cause.healthy).findings}


@EVERY
def test_it_is_not_judged_without_what_it_needs(cause: Cause) -> None:
    for name in cause.needs:
        part, _, attribute = name.partition(".")
        of_run = getattr(cause.sick, part)
        unknown = replace(of_run, **{attribute: None}) if attribute else None
        found = diagnose(replace(cause.sick, **{part: unknown})).findings
        assert cause.name not in {finding.cause for finding in found}


@EVERY_OF_MEMORY
def test_the_sick_error_has_it_first_and_the_healthy_one_has_not(cause: MemoryCause) -> None:
    first = diagnose(TRAINING, out_of_memory=cause.sick).findings[0]
    assert first.cause == cause.name
    assert cause.name not in {finding.cause for finding in diagnose(TRAINING, out_of_memory=cause.healthy).findings}


@pytest.mark.parametrize(("folder", "known"), [(causes, CAUSES), (memory_causes, MEMORY_CAUSES)])
def test_a_file_is_named_as_its_cause(folder: ModuleType, known: Mapping[str, AnyCause]) -> None:
    assert {path.stem for path in Path(folder.__path__[0]).glob("*.py")} == {*known, "__init__"}
    for name, cause in known.items():
        file = getattr(folder, name)
        assert file.CAUSE is cause
        assert file.__doc__.startswith(f"{name}: ")
        assert set(cause.after) <= {*known}
