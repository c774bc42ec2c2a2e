"""The report as a page: complete, small, harmless, readable without seeing, and alive in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sample_report import FINDING, REPORT
from simulated_report import DAY_S, simulated_report

from lightning_gpu_tools.cli import main
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.reports.report_file import ReportFile
from lightning_gpu_tools.training.run_measurements import SourceLine
from lightning_gpu_tools.training.stopwatch import PhaseSpan

pytest.importorskip("bokeh", reason="needs the extra plot")

from lightning_gpu_tools.reports.page import render_page, save_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# What a page may consist of. Scripts and styles are its own.
TAGS = {
    *("html", "head", "meta", "title", "style", "script", "body", "main", "article", "section", "h1", "h2", "h3", "h4"),
    *("p", "figure", "figcaption", "div", "ul", "li", "span", "details", "summary", "table", "caption", "thead"),
    *("tbody", "tr", "th", "td", "label", "select", "option"),
}


class Page(HTMLParser):
    """Collects what a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] not in ("script", "style"):
            self.texts.append(data)

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def day() -> str:
    """The page of a day on eight GPUs."""
    return render_page(simulated_report(gpus=8, seconds=DAY_S, epochs=10))


def test_a_day_on_eight_gpus_fits_two_megabytes(day: str) -> None:
    assert len(day.encode()) < 2e6


def test_a_page_holds_the_whole_report() -> None:
    page = " ".join(" ".join(Page(render_page(simulated_report(gpus=2, epochs=2))).texts).split())
    for words in (
        "LOW",
        "Why: Waiting for data takes 61 %",
        "Next: Set DataLoader(..., num_workers=6",
        "data loading 61 % of the time; measured. Without this wait: 2.6x.",
        "wait_ms_per_step 31",
        "Where the 24 h 00 min went",
        "training step 16 h 19 min 68.0 %",
        "backward 9 h 36 min 40.0 %",
        "GPU 1 NVIDIA H100 80GB HBM3 33 %",
        "activations and temporaries 5.00 GiB",
        "rank node own work data_loading",
        "batch_size 64",
    ):
        assert words in page


def test_a_page_loads_nothing_from_anywhere(day: str) -> None:
    page = Page(day)
    assert {name for name, _ in page.tags} <= TAGS
    assert not [attributes for _, attributes in page.tags if {"src", "href", "srcset"} & attributes.keys()]
    policy = next(one["content"] for one in page.attributes("meta") if "http-equiv" in one)
    assert policy is not None
    assert "default-src 'none'" in policy


def test_every_chart_has_a_name_and_every_table_a_head(day: str) -> None:
    page = Page(day)
    charts = [one for one in page.attributes("div") if one.get("role") == "img"]
    assert len(charts) == 1 + 2 + 3 + 1  # phases; rows of two metrics; lines of the GPU that is chosen; torch's memory
    assert all(one["aria-label"] for one in charts)
    tables = len(page.attributes("table"))
    assert tables == len(page.attributes("caption")) == len(page.attributes("thead"))
    assert {str(one.get("scope")) for one in page.attributes("th")} == {"col", "row"}
    assert sum(text == "Values as a table" for text in page.texts) == 2


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"&\x1b{0}"


def test_text_of_a_report_is_never_markup() -> None:
    report = simulated_report(gpus=5)
    hostile = replace(
        report,
        outcome=EVIL,
        phase_s={**report.phase_s, EVIL: 1.0, f"callback/{EVIL}": 1.0},
        spans=tuple(span._replace(phase_s={EVIL: 1.0}) for span in report.spans),
        gpus=tuple(replace(gpu, name=EVIL, uuid=EVIL, errors=(EVIL,)) for gpu in report.gpus),
        memory=tuple(replace(one, uuid=EVIL, parts_bytes={EVIL: 1}) for one in report.memory),
        ranks=tuple(replace(rank, phase_s={EVIL: 1.0}) for rank in report.ranks),
        lines=(SourceLine(phase=EVIL, file=EVIL, line=1, function=EVIL, samples=900),),
        diagnosis=replace(
            report.diagnosis, why=EVIL, next_step=EVIL, findings=(replace(FINDING, advice=EVIL, evidence={EVIL: EVIL}),)
        ),
        settings={EVIL: [EVIL], "model": EVIL},
        gpu_note=EVIL,
        confirmation=EVIL,
        unseen=(EVIL,),
    )
    text = render_page(hostile, hostile)
    page = Page(text)
    assert {name for name, _ in page.tags} <= TAGS
    assert not [one for _, one in page.tags if any(name.startswith("on") for name in one)]
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert sum("<img src=x" in shown for shown in page.texts) > 20  # it is all there, as text


def test_two_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = tuple(0.1 + i / 1e4 for i in range(8))
    old, new = (
        str(ReportFile(tmp_path / name).save(replace(REPORT, step_s_blocks=tuple(one * factor for one in blocks))))
        for name, factor in (("old", 1.0), ("new", 1.5))
    )
    assert main(["report", new, "--against", old, "--format", "html"]) == 1
    page = Page(capsys.readouterr().out)
    assert len(page.attributes("article")) == 2
    shown = " ".join(page.texts)
    assert "SLOWER: 100 ms per mean step before, 151 ms now: +50.0 %" in shown
    assert shown.index("Before: LOW") < shown.index("Now: LOW")


def test_two_runs_have_one_time_axis_and_one_order_of_phases() -> None:
    def run(data_s: float, step_s: float) -> Report:
        phase_s, wall_s = {"data_loading": data_s, "training_step": step_s}, data_s + step_s
        return replace(REPORT, wall_s=wall_s, phase_s=phase_s, spans=(PhaseSpan(0.0, wall_s, phase_s, 50),))

    text = render_page(run(1.0, 2.0), run(6.0, 2.0))
    legends = [re.findall("</span> ([a-z ]*)", one) for one in re.findall('<ul class="legend">(.*?)</ul>', text)]
    assert [one for one in legends if one[0] == "waiting for data "] == [["waiting for data ", "training step "]] * 2
    assert re.findall(
        r'"x_range":{"type":"object","name":"Range1d","id":"p\d+","attributes":{"end":([\d.]+)}', text
    ) == [
        "8.0",
        "8.0",
    ]
    shown = " ".join(" ".join(Page(text).texts).split())
    assert "waiting for data 120 ms 20 ms -83 % training step 40 ms 40 ms +0 %" in shown


# Waits until all is drawn, chooses another GPU, and leaves what it saw as text.
OBSERVER = """
<script>
const errors = []
addEventListener("error", (event) => errors.push(event.message))
addEventListener("securitypolicyviolation", (event) => errors.push(event.violatedDirective))
const canvases = (node) => [...node.querySelectorAll("*")].reduce(
  (sum, one) => sum + (one.localName === "canvas") + (one.shadowRoot ? canvases(one.shadowRoot) : 0), 0)
const wait = setInterval(() => {
  if (!window.Bokeh?.documents.length || !Bokeh.documents.every((one) => one.is_idle)) return
  clearInterval(wait)
  const drawn_ms = performance.now()
  const line = () => Bokeh.documents[0].get_model_by_name("now-utilization_percent").data.y
  const before = [...line()].slice(0, 3)
  const select = document.querySelector("select")
  if (select) { select.value = "1"; select.dispatchEvent(new Event("change")) }
  const seen = {errors, drawn_ms, canvases: canvases(document), before, after: [...line()].slice(0, 3)}
  document.documentElement.innerHTML = `<body><pre>${JSON.stringify(seen)}</pre></body>`
}, 10)
</script>
"""


def opened(page: str, folder: Path) -> Any:
    """Return what a browser makes of a page."""
    file = folder / "page.html"
    file.write_text(page.replace("</body>", OBSERVER + "</body>"))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder}", "--virtual-time-budget=20000", "--window-size=1280,900", file.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search("<pre>(.*?)</pre>", shown, re.DOTALL)
    assert found is not None, shown[-2000:]
    return json.loads(found[1])


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_every_chart_and_another_gpu(day: str, tmp_path: Path) -> None:
    seen = opened(day, tmp_path)
    assert seen["errors"] == []
    assert seen["canvases"] >= 7
    assert None not in seen["after"]
    assert max(seen["after"]) < 0.6 * max(seen["before"])  # the second GPU is the slow one


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_opens_the_page_of_a_thousand_gpus(tmp_path: Path) -> None:
    report = simulated_report(nodes=128, gpus=8, seconds=30 * DAY_S, epochs=500)
    page = save_page(report, tmp_path).read_text()
    assert len(page) < 4e6
    seen = opened(page, tmp_path)
    assert (seen["errors"], seen["canvases"] >= 7) == ([], True)
