"""Turns the docstrings of the package, which are read in editors and by ``help()``, into Markdown for the site."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod):`~?([\w.]+)`")
_EXAMPLE = re.compile(r"^Example::\n\n((?:    .*\n|\n)+)", re.MULTILINE)
_TABLE = re.compile(r"^(=+ [= ]+)\n(.*)\n\1\n((?:.+\n)+?)\1$", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Return a docstring with links for roles, and with fences around examples and tables."""

    def link(match: re.Match[str]) -> str:
        package, _, name = match[1].rpartition(".")
        return f"[`{name}`][{match[1]}]" if package == "lightning_gpu_tools" else f"`{name}`"

    def example(match: re.Match[str]) -> str:
        code = re.sub(r"^    ", "", match[1], flags=re.MULTILINE).strip("\n")
        return f"**Example**\n\n```python\n{code}\n```\n"

    def table(match: re.Match[str]) -> str:
        begins = [column.start() for column in re.finditer("=+", match[1])]
        columns = [slice(begin, end) for begin, end in zip(begins, [*begins[1:], None], strict=True)]
        head, *rows = ([line[column].strip() for column in columns] for line in (match[2], *match[3].splitlines()))
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))

    return _TABLE.sub(table, _EXAMPLE.sub(example, _ROLE.sub(link, text) + "\n")).rstrip("\n")


class Markdown(griffe.Extension):
    """Changes every docstring before it is divided into sections."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
