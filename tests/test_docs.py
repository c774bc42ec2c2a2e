"""The pages name every cause and verdict, their links work, and every table is what its source gives."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from sample_report import REPORT

from lightning_gpu_tools.advice import data_loading, uneven_steps
from lightning_gpu_tools.advice.findings import Cause, Verdict
from lightning_gpu_tools.advice.stall_causes import StallCause
from lightning_gpu_tools.reports.report import SCHEMA_VERSION
from lightning_gpu_tools.reports.text import render_text

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from tables import PAGES, TABLES, filled, results

DOCS = Path(__file__).parents[1] / "docs"
LOW = (DOCS / "low_gpu_utilization.md").read_text()
FULL = (DOCS / "out_of_memory.md").read_text()
HANGS = (DOCS / "hanging_training.md").read_text()
READ = (DOCS / "how_to_read_the_report.md").read_text()


def test_every_cause_is_explained() -> None:
    first_column = "".join(re.findall(r"^\| ([^|]+) \|", LOW + FULL + HANGS, re.MULTILINE))
    for cause in (*get_args(Cause), *get_args(StallCause)):
        assert f"`{cause}`" in first_column, cause
    kinds = set(re.findall(r'return "(\w+)"$', Path(data_loading.__file__).read_text(), re.MULTILINE))
    kinds |= set(re.findall(r'kind = "(\w+)"$', Path(uneven_steps.__file__).read_text(), re.MULTILINE))
    assert len(kinds) == 11
    for kind in kinds:
        assert f"`{kind}`" in first_column, kind


def test_every_verdict_is_explained() -> None:
    for verdict in get_args(Verdict):
        text = render_text(replace(REPORT, diagnosis=replace(REPORT.diagnosis, verdict=verdict)))
        assert f"`{text.partition('Verdict: ')[2].partition(' (')[0]}`" in READ, verdict


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: str(page.name))
def test_links_work_and_reports_fit_a_terminal(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (DOCS / target).exists(), target
    for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL):
        assert max(len(line) for line in block.splitlines()) <= 100


def test_every_table_is_what_its_source_gives() -> None:
    pages = [path.read_text() for path in PAGES]
    assert sorted(re.findall(r"<!-- table: (\w+) -->", "".join(pages))) == sorted(TABLES)
    for page in pages:
        assert filled(page) == page, "run: python -m benchmarks.tables"
    assert f"**Schema version {SCHEMA_VERSION}.**" in (DOCS / "report_schema.md").read_text()


def test_the_classifiers_name_the_pythons_that_were_run() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (DOCS.parent / "pyproject.toml").read_text())
    run = {one["machine"]["python"].rpartition(".")[0] for one in results("versions")["runs"]}
    assert set(named) == run
