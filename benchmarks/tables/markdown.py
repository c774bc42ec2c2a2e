"""Markdown elements, and the results shown in them."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lightning_gpu_tools.advice.findings import median_interval

ROOT = Path(__file__).parents[2]
RESULTS = "../benchmarks/results"  # from a page in docs/
QUIET = 1.2  # load averages above this are printed

Results = dict[str, Any]


def results(name: str) -> Results:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def source(command: str, *names: str) -> str:
    """Return the command, machine, and date of figures, with links to the raw results."""
    found = results(names[0])
    machine, load = found["machine"], max(results(name).get("load_average_before", 0.0) for name in names)
    links = ", ".join(f"[{name}.json]({RESULTS}/{name}.json)" for name in names)
    before = f", load average {load:.1f} before" if load > QUIET else ""
    repeat = ", to be repeated on an idle machine" if load > machine["cores"] else ""
    return f"`python benchmarks/{command}` on {hardware(machine)}, {machine['date']}{before}{repeat}: {links}."


def hardware(machine: Results) -> str:
    return f"{machine['cores']} CPU cores ({machine['processor']}, {machine['memory_gib']:.0f} GiB)"


def table(*rows: Sequence[str]) -> str:
    """Return a Markdown table. The first row is the header."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def block(*parts: str) -> str:
    """Return tables and paragraphs, with paragraphs wrapped as in the pages."""
    return "\n\n".join(
        part if part.startswith("|") else textwrap.fill(part, 125, break_on_hyphens=False, break_long_words=False)
        for part in parts
    )


def spread(values: Sequence[float], spec: str, unit: str) -> str:
    """Return the median of some values and their range, with the unit once."""
    of_range = f" ({min(values):{spec}} to {max(values):{spec}})" if len(values) > 1 else ""
    return f"{median(values):{spec}}{unit}{of_range}"


def milliseconds(times_s: Sequence[float]) -> str:
    return spread([1e3 * one for one in times_s], ".0f", " ms")


def with_interval(values: Sequence[float], spec: str, unit: str = "") -> str:
    """Return the median of some values and its 95% interval, or their range if there are too few."""
    low, high = median_interval(values) or (min(values), max(values))
    return f"{median(values):{spec}}{unit} ({low:{spec}} to {high:{spec}})"


def signed_percent(share: float) -> str:
    return f"{100 * share:+.1f}%".replace("-0.0", "0").replace("+0.0", "0")


def mean_size(shares: Sequence[float]) -> str:
    return f"{100 * sum(map(abs, shares)) / len(shares):.1f}%"


def in_rounds(runs: Results, name: str, key: str) -> list[tuple[float, float]]:
    """Return the values of the unchanged project and of another variant, by round."""
    return [(one[key], other[key]) for one, other in zip(runs["as it is"], runs[name], strict=True)]
