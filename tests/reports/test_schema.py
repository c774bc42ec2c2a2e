"""docs/report_schema.md says what gpu_report.json holds, no more and no less."""

import dataclasses
import re
from pathlib import Path

import pytest

from lightning_gpu_tools.advice.findings import Diagnosis, Finding
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports.report import SCHEMA_VERSION, LoaderSummary, RankSpeed, Report
from lightning_gpu_tools.training.memory_growth import MemoryGrowth
from lightning_gpu_tools.training.phases import PHASES

DOCUMENT = (Path(__file__).parents[2] / "docs" / "report_schema.md").read_text()


def rows(title: str) -> dict[str, str]:
    """Return the first two columns of the table under a heading."""
    section = DOCUMENT.split(f"## {title}\n", 1)[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, re.MULTILINE))


@pytest.mark.parametrize(
    ("title", "kind", "more"),
    [
        ("The report", Report, {"schema_version"}),
        ("`gpus[]`", GpuSummary, set()),
        ("`diagnosis`", Diagnosis, set()),
        ("`diagnosis.findings[]`", Finding, set()),
        ("`ranks[]`", RankSpeed, set()),
        ("`memory_growth[]`", MemoryGrowth, set()),
        ("`loader`", LoaderSummary, set()),
    ],
)
def test_every_field_is_documented_with_whether_it_may_be_null(title: str, kind: type, more: set[str]) -> None:
    documented = rows(title)
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    assert documented.keys() == fields.keys() | more
    for name, annotation in fields.items():
        assert documented[name].endswith(" or null") is ("None" in annotation), name


def test_every_phase_is_documented_and_so_is_the_version() -> None:
    assert rows("Phases") == {phase.name: phase.meaning for phase in PHASES.values()}
    assert f"**Schema version {SCHEMA_VERSION}.**" in DOCUMENT
