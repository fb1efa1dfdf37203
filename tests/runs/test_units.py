"""Sizes as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egop.runs.units import format_bytes, format_count, format_percent, format_table, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("2GiB", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        (" 1.5 MiB ", 3 * 2**19),
        ("500MB", 500_000_000),
        ("500 M", 500_000_000),
        ("64KiB", 65536),
        ("1kB", 1000),
        ("3TB", 3 * 10**12),
        ("1TiB", 2**40),
        ("17B", 17),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "two", "-1", "-1GiB", "2PiB", "1e9", "2GiBs", "1,5GB", -1, 2.5, None, True]
)
def test_what_is_not_a_size_is_refused_with_examples(text):
    with pytest.raises(
        ValueError, match=r"Invalid memory value: .*whole number of bytes or a text such as '2GiB' or '500MB'"
    ):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (150 * 1024, "150 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (24586240000, "22.9 GiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_sizes_are_written_in_binary_units(size, text):
    assert format_bytes(size) == text


@given(st.integers(0, 2**50))
@settings(deadline=None, max_examples=50)
def test_a_written_size_reads_back_to_two_digits(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.05, abs=0.5)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 "),
        (900, "900 "),
        (1000, "1.0 k"),
        (999_960, "1.0 M"),
        (16777216, "16.8 M"),
        (2e9, "2.0 G"),
        (3e15, "3.0 P"),
    ],
)
def test_counts_are_written_in_decimal_units(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0, "0.0 %"), (0.0001, "< 0.1 %"), (0.0123, "1.2 %"), (0.0996, "10 %"), (0.55, "55 %"), (1.5, "150 %")],
)
def test_fractions_are_written_in_percent(fraction, text):
    assert format_percent(fraction) == text


def test_a_table_has_its_first_column_to_the_left_and_numbers_to_the_right():
    assert format_table(["name", "n"], [["a", "1"], ["longer", "100"]]).splitlines() == [
        "name      n",
        "------  ---",
        "a         1",
        "longer  100",
    ]
