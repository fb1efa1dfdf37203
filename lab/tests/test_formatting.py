import pytest

from egop_lab.formatting import format_bytes, format_count, format_table, pluralize


def test_format_bytes_uses_binary_units():
    assert [format_bytes(size) for size in (1023, 150 * 1024, 2**20 - 1, 2**41)] == [
        "1023 B",
        "150 KiB",
        "1.0 MiB",
        "2.0 TiB",
    ]


@pytest.mark.parametrize(
    ("count", "text"), [(900, "900"), (1000, "1.0 k"), (999_960, "1.0 M"), (16777216, "16.8 M"), (3e15, "3.0 P")]
)
def test_format_count_uses_decimal_units(count, text):
    assert format_count(count) == text


def test_format_table_aligns_columns():
    assert format_table(["name", "n"], [["a", "1"], ["longer", "100"]]).splitlines() == [
        "name      n",
        "------  ---",
        "a         1",
        "longer  100",
    ]


def test_pluralize():
    assert (pluralize(1, "run"), pluralize(2, "run")) == ("1 run", "2 runs")
