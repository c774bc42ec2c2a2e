"""The code blocks of README.md and of the pages in docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?:<!-- needs (.*?) -->\n)?^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A code block; ``needs`` names what a machine may lack to run it, as a comment above the block says it."""

    place: str
    needs: str
    language: str
    text: str


def code_blocks() -> list[Block]:
    """Return the blocks of every page, each text once."""
    found: dict[str, Block] = {}
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            needs, language, block = match.groups(default="")
            place = f"{page.stem} line {text.count(chr(10), 0, match.start()) + 1}"
            found.setdefault(block, Block(place, needs, language, block))
    return [*found.values()]
