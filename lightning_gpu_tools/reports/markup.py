"""Text and tables as HTML. All input is plain text, never markup."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from lightning_gpu_tools.units import printable

_MAX_TEXT = 1000
_MAX_LINES = 40  # our default: a longer table is folded
_LONG = 24  # characters; a longer cell is text that wraps, not a number


class Bar(NamedTuple):
    """A cell with a bar."""

    share: float  # of the full length
    color: str


def escaped(text: object) -> str:
    """Return HTML that shows a text literally, in one line and at most 1,000 characters."""
    return html.escape(printable(text, _MAX_TEXT))


def element(name: str, text: object, css: str = "") -> str:
    """Return an element with this text and CSS class."""
    return f"<{name}{_class(css)}>{escaped(text)}</{name}>"


def folded(summary: str, content: str) -> str:
    """Return content that is collapsed until its summary is clicked."""
    return f"<details><summary>{escaped(summary)}</summary>{content}</details>"


def table(caption: str, head: Sequence[object], lines: Sequence[Sequence[object]], css: Sequence[str] = ()) -> str:
    """Return a table whose first column has row headers, with a CSS class for each line; empty without lines."""
    if not lines:
        return ""
    columns = "".join(f'<th scope="col">{escaped(name)}</th>' for name in head)
    rows = "".join(
        f'<tr{_class(kind)}><th scope="row">{escaped(first)}</th>{"".join(map(_cell, rest))}</tr>'
        for (first, *rest), kind in zip(lines, css or [""] * len(lines), strict=True)
    )
    content = (
        f'<div class="wide" tabindex="0"><table><caption>{escaped(caption)}</caption><thead><tr>{columns}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    return folded(f"{caption} ({len(lines)} lines)", content) if len(lines) > _MAX_LINES else content


def _cell(value: object) -> str:
    if isinstance(value, Bar):
        style = f"width:{10 * min(max(value.share, 0.0), 1.0):.2f}rem;background:{value.color}"
        return f'<td class="text"><span class="bar" style="{style}"></span></td>'
    return element("td", value, "text" if isinstance(value, str) and len(value) > _LONG else "")


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""
