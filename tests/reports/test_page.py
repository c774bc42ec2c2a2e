"""The picture and the page of a report: complete, small, harmless, and the same for jobs of every size."""

import struct
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from sample_report import FINDING, REPORT
from simulated_report import DAY_S, simulated_report

from lightning_gpu_tools.training.run_measurements import SourceLine

pytest.importorskip("matplotlib", reason="needs the extra plot")

import matplotlib

from lightning_gpu_tools.reports.page import _figure, png_of, render_page, svg_of
from lightning_gpu_tools.reports.text import details

# What a page consists of, outside its picture.
TAGS = ["html", "head", "meta", "meta", "meta", "title", "style", "body", "h1", *("p", "b") * 4, "div", "pre"]


class Page(HTMLParser):
    """Collects what a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def without_picture(page: str) -> tuple[Page, str]:
    before, _, picture = page.partition("<svg")
    picture, _, after = picture.partition("</svg>")
    return Page(before + after), picture


@pytest.mark.parametrize(("nodes", "gpus", "seconds"), [(1, 0, 10), (2, 8, 30 * DAY_S), (16, 8, 30 * DAY_S)])
def test_picture_and_page_of_any_job_are_small(nodes: int, gpus: int, seconds: float) -> None:
    report = simulated_report(nodes=nodes, gpus=gpus, seconds=seconds)
    picture = png_of(report)
    width, height = struct.unpack(">II", picture[16:24])
    assert (width, 250 < height < 1500) == (1440, True)
    assert len(picture) < 200_000
    assert len(render_page(report, svg_of(report)).encode()) <= 150_000


def test_a_page_holds_the_whole_report() -> None:
    report = replace(simulated_report(gpus=2), settings={"model": "LitModel & Co"}, outcome="completed")
    page, picture = without_picture(render_page(report, svg_of(report)))
    assert page.tags == TAGS
    assert "\n".join(details(report, full=True)) in page.texts
    assert {"GPU report of LitModel & Co", "LOW: the GPU is often idle"} <= {*page.texts}
    titles = [text.strip() for text in page.texts if text.strip() in ("Why:", "Next:", "Run:")]
    assert titles == ["Why:", "Next:", "Run:"]
    assert "waiting for data 6%" in picture
    assert Page(render_page(report)).tags == TAGS


def test_short_phases_do_not_look_like_long_ones() -> None:
    *phases, rest = _figure(REPORT, with_title=False).axes[0].collections
    assert phases
    assert all((phase.get_facecolor() != rest.get_facecolor()).any() for phase in phases)


def test_neither_dollar_signs_nor_a_users_style_break_the_picture() -> None:
    costly = replace(REPORT, diagnosis=replace(REPORT.diagnosis, why="$\\frac$ of $5_{ is text"))
    with matplotlib.rc_context({"text.usetex": True, "text.parse_math": True}):
        assert png_of(costly).startswith(b"\x89PNG")


EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>'\"&\x1b{0}"


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
    page, picture = without_picture(text)
    assert page.tags == [*TAGS[:9], "p", "b", *TAGS[9:]]  # with a result
    assert {*page.attributes} == {"lang", "charset", "name", "content", "http-equiv", "tabindex"}
    assert "<script" not in picture
    assert "<img" not in picture
    assert "default-src 'none'" in text
    assert "\x1b" not in text
    assert "".join(page.texts).count("<img src=x") > 12  # it is all there, as text
