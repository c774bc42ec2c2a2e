"""Markdown, and the results that stand in it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = "../benchmarks/results"  # from a page in docs/
QUIET = 1.2  # load average from which a reader should know of it

Results = dict[str, Any]


def results(name: str) -> Results:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def source(command: str, *names: str) -> str:
    """Return how the figures came about: by which command, when, on which machine, with links to them."""
    found = results(names[0])
    machine, load = found["machine"], max(results(name).get("load_average_before", 0.0) for name in names)
    links = ", ".join(f"[{name}.json]({RESULTS}/{name}.json)" for name in names)
    before = f", load average {load:.1f} before" if load > QUIET else ""
    repeat = ", to be repeated on a quiet machine" if load > machine["cores"] else ""
    return f"`python benchmarks/{command}` on {hardware(machine)}, {machine['date']}{before}{repeat}: {links}."


def hardware(machine: Results) -> str:
    return f"{machine['cores']} CPU cores ({machine['processor']}, {machine['memory_gib']:.0f} GiB)"


def table(*rows: Sequence[str]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def block(*parts: str) -> str:
    """Return tables and paragraphs, these wrapped as the pages are."""
    return "\n\n".join(
        part if part.startswith("|") else textwrap.fill(part, 125, break_on_hyphens=False, break_long_words=False)
        for part in parts
    )


def spread(values: Sequence[float], form: str) -> str:
    """Return the median, and the range of several values."""
    shown = form.format(median(values))
    return f"{shown} ({form.format(min(values))} to {form.format(max(values))})" if len(values) > 1 else shown


def in_rounds(runs: Results, name: str, key: str) -> list[tuple[float, float]]:
    """Return what the project as it is and another variant took, by round."""
    return [(one[key], other[key]) for one, other in zip(runs["as it is"], runs[name], strict=True)]


def median_and_range(times_s: Sequence[float]) -> str:
    """Return the median and the range in words."""
    return f"{1e3 * median(times_s):.0f} ms ({1e3 * min(times_s):.0f} to {1e3 * max(times_s):.0f})"
