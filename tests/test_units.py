"""Sizes and durations as users type them."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.units import (
    format_bytes,
    format_duration,
    number_ranges,
    parse_bytes,
    parse_duration,
    printable,
    printable_lines,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"), [(0, 0), ("8GiB", 8 * 2**30), ("1.5GB", 1_500_000_000), ("8G", 8 * 2**30)]
)
def test_sizes_are_read_in_iec_si_and_slurms_units(text: int | str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_s"), [(2, 2.0), (0.5, 0.5), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("250ms", 0.25)]
)
def test_durations_are_read_in_seconds(text: float | str, duration_s: float) -> None:
    assert parse_duration(text) == duration_s


@pytest.mark.parametrize(
    ("parse", "example", "text"),
    [
        *((parse_bytes, "8GiB", text) for text in ("8 bananas", "-1GiB", None, 2**64, "9" * 400)),
        *((parse_duration, "10m", text) for text in ("10 bananas", -1, float("nan"), None, True)),
    ],
)
def test_an_invalid_quantity_is_refused_with_an_example(parse: Any, example: str, text: object) -> None:
    with pytest.raises(ValueError, match=rf'^wait must be .*"{example}".*, got {re.escape(repr(text))}\.$'):
        parse(text, "wait")


@given(st.integers(0, 2**50))
def test_a_formatted_size_reads_back_within_its_three_digits(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.0051)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.0009997, "1 ms"), (0.0042, "4.2 ms"), (112.9, "1 min 53 s"), (600.0, "10 min"), (7500.0, "2 h 05 min")],
)
def test_durations_are_written_in_the_unit_a_reader_expects(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([4, 3], "3 and 4"),
        ([0, 3, 4, *range(8, 1024)], "0, 3, 4 and 8 to 1,023"),
        (range(0, 1024, 2), "0, 2, 4, 6, 8, 10, 12, 14 and 504 others"),
    ],
)
def test_numbers_are_written_as_few_ranges(numbers: list[int], text: str) -> None:
    assert number_ranges(numbers) == text


@given(st.one_of(st.text(), st.text(alphabet="\x1b\n\u202e\ud800a", min_size=90, max_size=130)), st.integers(2, 120))
def test_printable_text_is_one_line_and_limited(text: str, max_length: int) -> None:
    shown = printable(text, max_length)
    assert shown.isprintable()
    assert len(shown) <= max_length
    if text.isprintable() and len(text) <= max_length:
        assert shown == text


def test_long_text_keeps_both_ends_and_shows_escapes() -> None:
    assert printable("encoder\x1b[2J.weight") == r"encoder\x1b[2J.weight"
    assert printable("a" * 200_000 + "\nweight", 40) == "a" * 26 + "…" + r"aaaaa\nweight"


def test_unprintable_objects_are_shown_by_their_type() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert printable(nested) == "<list>"
    assert printable(10**5000) == "<int>"


@given(st.text())
def test_lines_keep_their_ends_and_lose_every_other_control_character(text: str) -> None:
    shown = printable_lines(text)
    assert shown.count("\n") == text.count("\n")
    assert all(map(str.isprintable, shown.split("\n")))
