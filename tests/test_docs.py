"""The pages name every verdict, their links work, and every table is what its source gives."""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import get_args

import pytest
from matrix import MATRIX
from sample_report import REPORT
from tables import PAGES, TABLES, filled
from tables.markdown import ROOT, results

import lightning_gpu_tools
from lightning_gpu_tools import errors, strategies, types
from lightning_gpu_tools.advice.findings import Verdict
from lightning_gpu_tools.cli.explain import GROUPS
from lightning_gpu_tools.reports.report import SCHEMA_VERSION, load_report
from lightning_gpu_tools.reports.text import render_text

DOCS = ROOT / "docs"
CONSTRAINTS = (ROOT / "constraints.txt").read_text()  # what .ci/run has
# Of pages and files of this repository.
ADDRESSES = (
    "lightning-gpu-tools.github.io",
    "lightning_gpu_tools/blob/main",
    "raw.githubusercontent.com/lightning-gpu-",
)
READ = (DOCS / "how_to_read_the_report.md").read_text()


def test_the_pages_that_explain_names_exist() -> None:
    for group in GROUPS:
        assert group.heading in anchors(DOCS / group.page)


def test_every_verdict_is_explained() -> None:
    for verdict in get_args(Verdict):
        text = render_text(replace(REPORT, diagnosis=replace(REPORT.diagnosis, verdict=verdict)))
        assert f"`{re.split('[:(]', text.partition('Verdict: ')[2])[0].strip()}`" in READ, verdict


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page, as Markdown makes them of its headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"[^\w\s-]", "", one).strip().lower() for one in re.findall(r"^#+ (.*)", text, re.MULTILINE)]
    return {re.sub(r"[-\s]+", "-", one) for one in headings} | set(re.findall(r"\{ #(\w+) \}", text))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_work_and_reports_fit_a_terminal(page: Path) -> None:
    text = page.read_text()
    for target, _, anchor in (one.partition("#") for one in re.findall(r"\]\(([^)\s]+)\)", text)):
        file = page.parent / target if target else page
        if "://" not in target:
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"
    assert not any(address in text for address in ADDRESSES)  # so that links work in a clone
    for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL):
        assert max(len(line) for line in block.splitlines()) <= 100


def test_pages_are_short() -> None:
    """A visitor wants the answer: a page that grows is split, with the reader's part first."""
    for page in PAGES:
        assert page.stat().st_size <= (5_000 if page.name == "README.md" else 12_000), page.name


def test_the_reference_has_every_public_name() -> None:
    shown = re.findall(r"^::: (\S+)", "".join(page.read_text() for page in DOCS.rglob("*.md")), re.MULTILINE)
    modules = (lightning_gpu_tools, strategies, types)
    public = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    named = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    public |= {f"{errors.__name__}.{name}" for name in named - {"_Message", *lightning_gpu_tools.__all__}}
    assert sorted(shown) == sorted(public - {"lightning_gpu_tools.__version__"})


def test_every_page_is_in_the_navigation_once() -> None:
    shown = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_table_is_what_its_source_gives() -> None:
    pages = [path.read_text() for path in PAGES]
    assert sorted(re.findall(r"<!-- table: (\w+) -->", "".join(pages))) == sorted(TABLES)
    for page in pages:
        assert filled(page) == page, "run: python -m benchmarks.tables"
    assert f"**Schema version {SCHEMA_VERSION}.**" in (DOCS / "report_schema.md").read_text()


def test_the_figures_of_the_readme_are_those_of_its_results() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = render_text(load_report(ROOT / "benchmarks" / "results" / "h200" / "following_advice_1.json"))
    shown = " ".join(shown[shown.index("Verdict:") : shown.index("Run:")].split())
    assert shown.replace(" %", "%") in " ".join(readme.split())  # an earlier version wrote 12 %
    off = [abs(one["error"]["in use"]) for one in results("h200/dry_run_peaks")["runs"]]
    assert f"[{100 * mean(off):.1f}% on average and {100 * max(off):.1f}% at worst]" in readme
    *_, ours = results("crash_consistency")["kills"].values()
    assert {kill["verdict"] for kill in ours} == {"PASS"}
    assert "ckpt-chaos, [agrees]" in readme


def test_the_classifiers_name_the_pythons_that_were_run() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (DOCS.parent / "pyproject.toml").read_text())
    run = {one["machine"]["python"].rpartition(".")[0] for one in results("versions")["runs"]}
    assert set(named) == run


def test_the_workflow_runs_the_matrix() -> None:
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    run = re.findall(r'torch: "(.*?)", lightning: "(.*?)", python: "(.*?)"', workflow)
    pinned = [re.search(rf"^{name}==(.*)", CONSTRAINTS, re.MULTILINE)[1] for name in ("torch", "lightning")]  # type: ignore[index]
    assert [*MATRIX] == sorted(
        [*((torch, lightning, f"python{python}") for torch, lightning, python in run), (*pinned, "python3.11")],
        key=lambda one: [int(part) for part in one[0].split(".")],
    )
