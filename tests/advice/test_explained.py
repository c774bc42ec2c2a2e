"""Thresholds of a file, and the comments that belong to each."""

from pathlib import Path

import pytest

from lightning_gpu_tools.advice.explained import thresholds_in

FILE = """
# Our defaults, unless a source is named. Two lines
# above two thresholds.
_FIRST = 0.5
_SECOND = 2**10
THIRD = 3  # of its own
# Another source.
FOURTH = (7, 0)  # and more
_WORDS = "no number"
IS_NO_NUMBER = True
_MAX_LINES = 3  # lines in the report

FIFTH = 1 / 4  # after an empty line


def function() -> float:
    INSIDE = 1.0
    return INSIDE
"""
ALL = "Our defaults, unless a source is named."


def test_comments_above_and_beside_thresholds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_file_with_thresholds.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    assert [tuple(one) for one in thresholds_in("a_file_with_thresholds")] == [
        ("FIRST", 0.5, f"{ALL} Two lines above two thresholds.", ""),
        ("SECOND", 1024, f"{ALL} Two lines above two thresholds.", ""),
        ("THIRD", 3, ALL, "of its own"),
        ("FOURTH", (7, 0), f"{ALL} Another source.", "and more"),
        ("FIFTH", 0.25, "", "after an empty line"),
    ]
