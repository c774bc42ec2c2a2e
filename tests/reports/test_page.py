"""The picture and the page of a report: complete, small, harmless, and the same for jobs of every size."""

from __future__ import annotations

import struct
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from sample_report import FINDING
from simulated_report import DAY_S, simulated_report

from lightning_gpu_tools.training.run_measurements import SourceLine

pytest.importorskip("matplotlib", reason="needs the extra plot")

from lightning_gpu_tools.reports.page import png_of, render_page, svg_of

# What a page may consist of, outside its picture.
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "p", "dl", "dt", "dd", "div"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td"),
}
SIZES = [(1, 0, 10), (16, 8, 30 * DAY_S)]


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
        if self._inside and self._inside[-1] != "style":
            self.texts.append(data)


@pytest.mark.parametrize(("nodes", "gpus", "seconds"), SIZES)
def test_picture_and_page_of_any_job_are_small(nodes: int, gpus: int, seconds: float) -> None:
    report = simulated_report(nodes=nodes, gpus=gpus, seconds=seconds)
    assert len(render_page(report, svg_of(report)).encode()) <= 150_000
    picture = png_of(report)
    width, height = struct.unpack(">II", picture[16:24])
    assert (width, 250 < height < 1500) == (1440, True)
    assert len(picture) < 500_000


def test_a_page_holds_the_whole_report() -> None:
    report = replace(simulated_report(gpus=2), confirmation="num_workers 0 -> 6: 2.1x, confirmed.")
    page = " ".join(" ".join(Page(render_page(report)).texts).split())
    for words in (
        "LOW: the GPU is often idle completed",
        "Why Waiting for data takes 61%",
        "Next Set DataLoader(..., num_workers=6",
        "Result num_workers 0 -> 6: 2.1x, confirmed.",
        "data loading 61% of the time. Without this wait: 2.6x. Set DataLoader(",
        "Where the 24 h 00 min went phase time share per step training step 16 h 19 min 68.0%",
        "– backward 9 h 36 min 40.0%",
        "p5 and p95: in 5% and 95% of the driver's samples",
        "activations and temporaries 5.00 GiB",
        "batch_size 64",
    ):
        assert words in page


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"&\x1b{0}"


def test_text_of_a_report_is_never_markup() -> None:
    report = simulated_report(gpus=5)
    hostile = replace(
        report,
        outcome=EVIL,
        phase_s={**report.phase_s, EVIL: 1.0, f"callback/{EVIL}": 1.0},
        spans=tuple(span._replace(phase_s={EVIL: 1.0}) for span in report.spans),
        gpus=tuple(replace(gpu, name=EVIL, uuid=EVIL, errors=(EVIL,)) for gpu in report.gpus),
        memory=tuple(replace(account, uuid=EVIL, parts_bytes={EVIL: 1}) for account in report.memory),
        lines=(SourceLine(phase=EVIL, file=EVIL, line=1, function=EVIL, samples=900),),
        diagnosis=replace(
            report.diagnosis, why=EVIL, next_step=EVIL, findings=(replace(FINDING, advice=EVIL, evidence={EVIL: EVIL}),)
        ),
        settings={EVIL: [EVIL], "model": EVIL},
        gpu_note=EVIL,
        confirmation=EVIL,
        unseen=(EVIL,),
    )
    text = render_page(hostile, svg_of(hostile))
    before, _, picture = text.partition("<svg")
    picture, _, after = picture.partition("</svg>")
    page = Page(before + after)
    assert {name for name, _ in page.tags} <= TAGS
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith(("on", "src", "href"))]
    assert "default-src 'none'" in before
    assert "\x1b" not in text
    assert sum("<img src=x" in shown for shown in page.texts) > 12  # it is all there, as text
    assert "<script" not in picture
    assert "<img" not in picture
