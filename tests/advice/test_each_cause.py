"""Each file of ``advice/causes``: its sick and its healthy example, and what it says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from lightning_gpu_tools.advice import causes
from lightning_gpu_tools.advice.cause import Cause
from lightning_gpu_tools.advice.causes import CAUSES
from lightning_gpu_tools.advice.diagnosis import diagnose

EVERY = pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)


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


@EVERY
def test_a_file_is_named_as_its_cause(cause: Cause) -> None:
    file: ModuleType = getattr(causes, cause.name)
    assert file.CAUSE is cause
    assert (file.__doc__ or "").startswith(f"{cause.name}: ")
    assert set(cause.after) <= {*CAUSES}


def test_every_file_is_a_cause() -> None:
    assert {path.stem for path in Path(causes.__path__[0]).glob("*.py")} == {*CAUSES, "__init__"}
