"""Explanations of all causes, by name, from their values and the source of their files.

The docstring of a cause's file contains its name and meaning, and after an empty line how it is measured. A threshold
is a number in a constant of the file, or in a constant that its functions use from other files of ``advice``. The
comment after it on its line, and the comment above it, give its meaning and source. A threshold without a comment
shares the comment of the one above. "Our defaults." at the start of a comment applies up to the next empty line. If the
comment after a number says "in the report" or "in the advice", it is for the text alone, and no threshold.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from lightning_gpu_tools.advice.cause import AnyCause, Cause, MemoryCause, Shape, StallCause
from lightning_gpu_tools.advice.causes import CAUSES
from lightning_gpu_tools.advice.memory_causes import MEMORY_CAUSES
from lightning_gpu_tools.advice.stall_causes import STALL_CAUSES
from lightning_gpu_tools.training.phases import PHASES

SITE = "https://lightning-gpu-tools.github.io/lightning_gpu_tools"
_ADVICE = "lightning_gpu_tools.advice"
# These files make predictions, texts and examples, and decide on no cause.
_NO_JUDGES = {"batch_size", "caching_allocator", "examples", "lines", "loader_plan", "memory_remedies"}
_CONSTANT = re.compile(r"(?P<name>_?[A-Z][A-Z0-9_]*) = .*?(?:  # (?P<meaning>.*))?")
_OF_TEXT = re.compile(r"in the (report|advice)\b")
_OF_ALL = re.compile(r"(Our defaults[^.:]*\.)\s*(.*)")


class Group(NamedTuple):
    """Causes of the same kind, in a folder of their own."""

    title: str
    place: str  # in gpu_report.json
    folder: str
    causes: Mapping[str, AnyCause]
    page: str  # of docs/
    heading: str  # of the table in it
    common: str  # the file of advice/ whose thresholds apply to all of them; empty if there is none


_FINDINGS, _STALLS = "diagnosis.findings[].cause", "stalls[].cause"
_FIXES, _SEEN = "causes-and-fixes", "what-it-looks-like-and-what-to-change"
GROUPS = (
    Group("slow training", _FINDINGS, "causes", CAUSES, "low_gpu_utilization.md", _FIXES, "findings"),
    Group("out of memory", _FINDINGS, "memory_causes", MEMORY_CAUSES, "out_of_memory.md", _FIXES, ""),
    Group("no progress", _STALLS, "stall_causes", STALL_CAUSES, "hanging_training.md", _SEEN, "stall_patience"),
)


class Threshold(NamedTuple):
    """A number that a cause is judged by."""

    name: str  # of the constant, without a leading underscore
    value: float | Sequence[float]  # in the unit that the name or a comment gives
    about: str  # comment above it, which other thresholds may share
    meaning: str  # comment after it on its line


@dataclass(frozen=True, kw_only=True)
class Explained:
    """An explanation of a cause, as ``lightning-gpu-tools explain`` prints it."""

    name: str  # in gpu_report.json
    group: str  # title of its group
    place: str  # field of gpu_report.json that contains it
    meaning: str  # as a sentence
    measured: str  # how, in sentences
    needs: Sequence[str]  # attributes of RunMeasurements without which it is not judged
    shapes: Sequence[Shape]  # its forms
    thresholds: Sequence[Threshold]
    common_thresholds: Sequence[Threshold]  # of all causes of the group
    order: str  # causes that suppress or precede it, and that it suppresses or precedes, in sentences
    verified_on: str  # the best machine on which the package found it in a real run
    more: str  # page of the documentation


def explained() -> Iterator[Explained]:
    """Yield all causes, by group and name. Names are unique within a group only."""
    for group in GROUPS:
        page = f"{SITE}/{group.page.removesuffix('.md')}/"
        common = tuple(thresholds_in(f"{_ADVICE}.{group.common}")) if group.common else ()
        for name, cause in sorted(group.causes.items()):
            file = f"{_ADVICE}.{group.folder}.{name}"
            meaning, measured = _docstring(file)
            yield Explained(
                name=name,
                group=group.title,
                place=group.place,
                meaning=meaning,
                measured=" ".join(filter(None, (_line_of_tree(group, name), measured))),
                needs=cause.needs if isinstance(cause, Cause) else (),
                shapes=[_plain(one, page) for one in cause.shapes],
                thresholds=[one for one in dict.fromkeys(_thresholds(file)) if one not in common],
                common_thresholds=common,
                order=_order(name, group.causes),
                verified_on=cause.verified_on,
                more=f"{page}#{group.heading}",
            )


def _plain(shape: Shape, page: str) -> Shape:
    """Return a form without Markdown emphasis, and with URLs in place of links."""
    plain = (re.sub(r"\*(\w+)\*", r"\1", text) for text in shape)
    return Shape(*(re.sub(r"\[[^]]+\]\((#[\w-]+)\)", rf"{page}\1", text) for text in plain))


def _line_of_tree(group: Group, name: str) -> str:
    is_line = group.causes is CAUSES and name in PHASES
    return f'Its time is the line "{PHASES[name].label}" of the report.' if is_line else ""


def _order(name: str, causes: Mapping[str, AnyCause]) -> str:
    cause, before = causes[name], [other for other, one in causes.items() if name in one.after]
    sentences = []
    if isinstance(cause, Cause):
        if cause.after:
            sentences.append(f"It is not reported if {_listed(cause.after, 'or')} has a finding.")
        if before:
            sentences.append(f"If it has a finding, {_listed(before)} {'are' if before[1:] else 'is'} not reported.")
        if cause.is_remark:
            sentences.append("It slows a busy GPU down but leaves none idle, so it makes no run LOW.")
        if cause.counts_while_busy:
            sentences.append("It makes a run LOW even if the GPU looks busy.")
        return " ".join(sentences)
    if isinstance(cause, MemoryCause) and cause.is_last_resort:
        return "It is judged last, and only if no other cause applies."
    places = {"after": cause.after, "before": before}
    where = ", ".join(f"{word} {_listed(names)}" for word, names in places.items() if names)
    sentences.append(f"It is judged {where}.")
    if isinstance(cause, StallCause):
        sentences.append("Only the first cause found is reported.")
    else:
        sentences.append(
            "If several causes apply, Why and Next come from the first, and the others are listed after it."
        )
    return " ".join(sentences)


def _listed(names: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _docstring(file: str) -> tuple[str, str]:
    first, _, rest = (inspect.getdoc(import_module(file)) or "").partition("\n\n")
    return _text(first.partition(": ")[2]), _text(rest)


def _text(docstring: str) -> str:
    return re.sub(r"\s+", " ", docstring).replace("``", "`").strip()


def _thresholds(file: str) -> Iterator[Threshold]:
    """Yield the thresholds of a cause's file, and those that its functions use from other files of ``advice``."""
    yield from thresholds_in(file)
    seen, names = set(), [(file, one.name) for one in _tree(file).body if isinstance(one, ast.FunctionDef)]
    while names:
        at = names.pop(0)
        if at in seen:
            continue
        seen.add(at)
        yield from (one for one in thresholds_in(at[0]) if at[1].lstrip("_") == one.name)
        names += _used_by(*at)


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse(inspect.getsource(import_module(file)))


@cache
def _used_by(file: str, name: str) -> Sequence[tuple[str, str]]:
    """Return (file, name) of everything that the function uses from its own file and others in ``advice``."""
    tree = _tree(file)
    known = {one: (file, one) for one in vars(import_module(file))}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            known |= {one.asname or one.name: (str(node.module), one.name) for one in node.names}
    function = next((one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name), None)
    used = [node.id for node in ast.walk(function) if isinstance(node, ast.Name)] if function else []
    found = (known[one] for one in dict.fromkeys(used) if one in known)
    return [one for one in found if one[0].startswith(_ADVICE) and one[0].rpartition(".")[2] not in _NO_JUDGES]


@cache
def thresholds_in(file: str) -> Sequence[Threshold]:
    """Return the numbers in a module's constants, in order, with their comments."""
    module = import_module(file)
    found, of_all, above, is_below_comment = [], "", "", False
    for line in inspect.getsource(module).splitlines():
        is_comment, constant = line.startswith("# "), _CONSTANT.fullmatch(line)
        if is_comment:
            text = line.removeprefix("# ")
            above = f"{above} {text}".strip() if is_below_comment else text
            if match := _OF_ALL.fullmatch(above):
                of_all, above = match.groups()
        elif constant is None:
            of_all = above = ""
        elif _is_number(value := vars(module)[constant["name"]]) and not _OF_TEXT.search(constant["meaning"] or ""):
            meaning = constant["meaning"] or ""
            about = above if is_below_comment or not meaning else ""
            name = constant["name"].lstrip("_")
            found.append(Threshold(name, value, " ".join(filter(None, (of_all, about))), meaning))
        is_below_comment = is_comment
    return found


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a number, or a version as a tuple of integers."""
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(one, int) for one in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)
