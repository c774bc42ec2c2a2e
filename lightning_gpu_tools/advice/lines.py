"""Source lines that take the time of a phase, by their number of samples. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lightning_gpu_tools.memory.readings import MemoryLine
from lightning_gpu_tools.training.phases import base_phase
from lightning_gpu_tools.training.run_measurements import SourceLine
from lightning_gpu_tools.units import format_bytes, printable

# Our defaults.
MIN_SAMPLES = 20  # of a phase: with 20, a share is known to within 22 points either way (95%), with 200 to within 7
_MIN_SHARE = 0.10  # a line with less is not worth reporting
_MAX_LINES = 3
_MAX_NAME = 100  # characters of a file or a function
# If the innermost line is in one of these, the program has no line to change there.
_FRAMEWORKS = ("torch/", "lightning/", "pytorch_lightning/", "lightning_fabric/")


class LineShare(NamedTuple):
    """A source line, and its share of the samples of some phases."""

    file: str
    line: int
    function: str
    share: float
    samples: int

    def __str__(self) -> str:
        return in_words(self.file, self.line, self.function)


def in_words(file: str, line: int, function: str) -> str:
    """Return a line as ``"data.py:41 in decode"``."""
    return f"{printable(file, _MAX_NAME)}:{line} in {printable(function, _MAX_NAME)}"


def is_of_program(file: str) -> bool:
    """Return whether a file belongs to the program, not to a framework."""
    return bool(file) and not file.startswith(_FRAMEWORKS)


def seen_in(lines: Sequence[SourceLine], *phases: str) -> list[LineShare]:
    """Return the lines sampled in these phases, or in phases of these groups, most frequent first.

    Shares add up to 1: samples without a line of the user's code count for the framework's line.
    """
    samples: Counter[tuple[str, int, str]] = Counter()
    for seen in lines:
        if seen.phase in phases or base_phase(seen.phase) in phases:
            samples[seen.file, seen.line, seen.function] += seen.samples
    whole = samples.total()
    by_share = sorted(samples.items(), key=lambda item: (-item[1], item[0]))
    return [LineShare(*place, count / whole, count) for place, count in by_share if count]


def worth_reporting(shares: Sequence[LineShare]) -> list[LineShare]:
    """Return the lines with the largest shares; none if there are too few samples."""
    if sum(line.samples for line in shares) < MIN_SAMPLES:
        return []
    return [line for line in shares if line.share >= _MIN_SHARE][:_MAX_LINES]


def top_source_lines(lines: Sequence[SourceLine], *phases: str) -> str | None:
    """Return the lines that take the time of these phases, in the format of ``evidence["source_lines"]``.

    ``"data.py:41 in decode (62%), data.py:57 in __getitem__ (20%)"``; ``None`` if there are too few samples.
    """
    named = worth_reporting(seen_in(lines, *phases))
    return ", ".join(f"{line} ({100 * line.share:.0f}%)" for line in named) or None


def holding(lines: Sequence[MemoryLine]) -> str | None:
    """Return the program's lines that allocated most of the memory in ``lines``, each at least 10% of it.

    ``"net.py:41 in forward (1.20 GiB), net.py:57 in forward (310 MiB)"``; ``None`` without one.
    """
    whole = sum(line.bytes for line in lines)
    named = [line for line in lines if is_of_program(line.file) and line.bytes >= _MIN_SHARE * whole][:_MAX_LINES]
    return ", ".join(f"{in_words(*line[3:])} ({format_bytes(line.bytes)})" for line in named) or None


def top_line_sentence(lines: Sequence[SourceLine], *phases: str, whose: str = "this time") -> str:
    """Return a sentence about the line that takes most of these phases; empty if it is not in the program."""
    for line in worth_reporting(seen_in(lines, *phases))[:1]:
        if is_of_program(line.file):
            return f"{100 * line.share:.0f}% of {whose} is at {line}."
    return ""
