"""The report of a training run as an HTML page without scripts."""

from __future__ import annotations

import html
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence

from lightning_gpu_tools import files
from lightning_gpu_tools.advice.findings import gain, label_of
from lightning_gpu_tools.advice.memory_account import PARTS, MemoryAccount
from lightning_gpu_tools.reports.gpu_table import gpu_rows
from lightning_gpu_tools.reports.report import DRAWN, FILE_NAME, Report
from lightning_gpu_tools.reports.report_file import load_report
from lightning_gpu_tools.reports.text import (
    LINE_COLUMNS,
    cause_phase,
    fullest_first,
    gpu_label,
    line_label,
    line_rows,
    measuring_lines,
    paragraphs,
    phase_groups,
    sentences,
    verdict_line,
)
from lightning_gpu_tools.units import format_bytes, format_duration, printable

_TIMEOUT_S = 120  # our default: at its first import on a machine, matplotlib reads all fonts
_NICENESS = 10  # our default: the next run has priority
_MAX_TEXT = 1000  # characters
_LONG = 24  # characters; a longer cell wraps
# Of columns of the GPUs' table.
_MEANINGS = {
    "p95": "p5 and p95: in 5% and 95% of the driver's samples, the GPU was at most this busy.",
    "waits": "waits: time in which the GPU looked busy, but waited in a collective for a later rank.",
}
# The page may load nothing, and runs no scripts.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
:root {{ color-scheme: light; font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 75rem; }}
h1 {{ font-size: 1.4rem; }}
p, dd {{ max-width: 55rem; overflow-wrap: anywhere; }}
dt {{ font-weight: 600; }}
.wide {{ overflow-x: auto; margin: 1.2rem 0; }}
svg {{ width: 100%; min-width: 50rem; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
caption, th, td {{ padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; white-space: nowrap; }}
caption, thead th {{ font-weight: 600; }}
tbody .text {{ white-space: normal; min-width: 10rem; overflow-wrap: anywhere; }}
thead th {{ border-bottom: 1px solid #767676; }}
tbody th {{ font-weight: 400; }}
</style>
</head>
<body>
{content}
</body>
</html>
"""


def render_page(report: Report, picture: str = "") -> str:
    """Return the report as a page of at most 150 kB: verdict, reason and advice, the picture as SVG, and the tables."""
    title = f"GPU report of {report.settings.get('model') or 'a run'}"
    return _PAGE.format(title=_escaped(title), content="\n".join(_content(report, picture)))


def _content(report: Report, picture: str) -> Iterator[str]:
    yield f"<h1>{_escaped(verdict_line(report))}</h1>"
    yield _paragraph(report.outcome)
    yield _list(paragraphs(report).items())
    if picture:
        svg = picture.replace("<svg", '<svg role="img" aria-label="Picture of the run; the tables follow"', 1)
        yield f'<div class="wide" tabindex="0">{svg}</div>'
    yield from map(_paragraph, sentences(report))
    yield _table(
        f"Where the {format_duration(report.wall_s)} went", ("phase", "time", "share", "per step"), _time(report)
    )
    findings = []
    for finding in report.diagnosis.findings:
        speedup = f"{gain(finding)} " if finding.share and not math.isinf(finding.ceiling) else ""
        share = f"{100 * finding.share:.0f}% of the time. {speedup}" if finding.share else ""
        findings.append((finding.cause.replace("_", " "), f"{share}{finding.advice}"))
    yield _list(findings)
    yield _table("Source lines", LINE_COLUMNS, line_rows(report))
    titles, units, *rows = gpu_rows(report.gpus)
    yield _table("GPUs", [f"{title} {unit}" for title, unit in zip(titles, units, strict=True)], rows)
    yield from (_paragraph(text) for title, text in _MEANINGS.items() if title in titles)
    for account in fullest_first(report.memory)[:1]:
        yield _table(f"Memory of {gpu_label(account)} at the peak", ("part", "size"), _memory(account))
    yield from map(_paragraph, measuring_lines(report))
    yield _table("Settings", ("setting", "value"), [item for item in report.settings.items() if item[1] is not None])


def _time(report: Report) -> Iterator[Sequence[object]]:
    cause = cause_phase(report)
    for group, parts in phase_groups(report.phase_s).items():
        named = [(f"{group}/{name}", f"– {name}", seconds) for name, seconds in parts.items() if name]
        for phase, label, seconds in [(group, label_of(group, report.activity), sum(parts.values())), *named]:
            share = f"{100 * seconds / max(report.wall_s, 1e-9):.1f}%"
            per_step = format_duration(seconds / max(1, report.steps))
            yield f"{label} ◀ cause" if phase == cause else label, format_duration(seconds), share, per_step


def _memory(account: MemoryAccount) -> Iterator[Sequence[object]]:
    for name, size in account.parts_bytes.items():
        yield PARTS.get(name, name), format_bytes(size)
    for what, lines in {"added at the peak": account.peak_lines, "kept after steps": account.kept_lines}.items():
        for line in lines:
            yield f"– {what}: {line_label(line)}", format_bytes(line.bytes)


def _escaped(text: object) -> str:
    """Return HTML that shows a text literally, in one line."""
    return html.escape(printable(text, _MAX_TEXT))


def _paragraph(text: str) -> str:
    return f"<p>{_escaped(text)}</p>"


def _list(texts: Iterable[tuple[str, str]]) -> str:
    """Return a list of texts with titles."""
    return f"<dl>{''.join(f'<dt>{_escaped(title)}</dt><dd>{_escaped(text)}</dd>' for title, text in texts)}</dl>"


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose first column has row headers; empty without rows."""
    columns = "".join(f'<th scope="col">{_escaped(name)}</th>' for name in head)
    lines = "".join(
        f"<tr>{_cell('th', first)}{''.join(_cell('td', cell) for cell in rest)}</tr>" for first, *rest in rows
    )
    if not lines:
        return ""
    return (
        f'<div class="wide" tabindex="0"><table><caption>{_escaped(caption)}</caption><thead><tr>{columns}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _cell(tag: str, content: object) -> str:
    scope = ' scope="row"' if tag == "th" else ""
    css = ' class="text"' if len(str(content)) > _LONG else ""
    return f"<{tag}{scope}{css}>{_escaped(content)}</{tag}>"


def draw(folder: str) -> None:
    """Draw the report in a folder into that folder, in a separate process; if it fails, print why."""

    def give_up(*_: object) -> None:
        raise TimeoutError("it took too long")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_TIMEOUT_S)
    os.nice(_NICENESS)
    source = os.path.join(folder, FILE_NAME)
    if not files.exists(source):  # the folder was removed, such as a temporary one
        return
    try:
        from lightning_gpu_tools.reports.plot import png_of, svg_of  # imports matplotlib

        report = load_report(source)
        for name, content in zip(DRAWN, (png_of(report), render_page(report, svg_of(report)).encode()), strict=True):
            if files.exists(source):
                with files.writing(os.path.join(folder, name)) as target:
                    target.write(content)
    except Exception as error:  # noqa: BLE001 - a broken matplotlib, a full disk
        reason = f"{type(error).__name__}: {printable(error, 300)}"
        sys.stdout.write(f"The picture of the report could not be drawn: {reason}\n")
