"""Byte sizes, progress bars and tables."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egop.formatting import (
    format_bytes,
    format_table,
    mask_layer_numbers,
    parse_bytes,
    pluralize,
    progress_interval,
)


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
def test_parse_bytes_reads_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "two", "-1", "-1GiB", "2PiB", "1e9", "2GiBs", "1,5GB", -1, 2.5, None, True]
)
def test_parse_bytes_refuses_other_values(text):
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
def test_format_bytes_uses_binary_units(size, text):
    assert format_bytes(size) == text


@given(st.integers(0, 2**50))
@settings(deadline=None, max_examples=50)
def test_formatted_size_parses_back(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.05, abs=0.5)


@pytest.mark.parametrize(("is_terminal", "seconds"), [(True, 0.1), (False, 10.0)])
def test_progress_bars_do_not_fill_log_files(monkeypatch, is_terminal, seconds):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert progress_interval() == seconds
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    assert progress_interval() == 0.1  # a notebook shows one bar


def test_format_table_aligns_columns():
    assert format_table(["name", "n"], [["a", "1"], ["longer", "100"]]).splitlines() == [
        "name      n",
        "------  ---",
        "a         1",
        "longer  100",
    ]


def test_mask_layer_numbers():
    assert mask_layer_numbers("layers.3.conv1.weight") == "layers.*.conv1.weight"
    assert mask_layer_numbers("0.weight") == "*.weight"


def test_pluralize():
    assert (pluralize(1, "run"), pluralize(2, "run"), pluralize(0, "run")) == ("1 run", "2 runs", "0 runs")
