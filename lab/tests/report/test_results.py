"""Pages show the table of results that the records give."""

from __future__ import annotations

from pathlib import Path

import pytest

import egop
from egop_lab.report import results

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "docs" / "records"
PAGES = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if results.BEGIN in page.read_text()
]


def test_some_page_shows_the_table():
    assert ROOT / "docs" / "coordinates.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_table_is_that_of_the_records(page):
    shown = page.read_text().split(results.BEGIN)[1].split(results.END)[0]
    assert shown.strip() == results.make_table(RECORDS), "copy results.md of: egop-lab report --records docs/records"


def test_the_docstring_has_the_same_numbers():
    header, _, *rows = (
        [cell.strip("* ") for cell in line.split("|")[1:-1]] for line in results.make_table(RECORDS).split("\n")
    )
    for name in ("EGOP", "Muon", "NorMuon", "SOAP", "AdamW"):
        column = header.index(name)
        format_loss = next(
            line.split(maxsplit=1)[1] for line in egop.EGOP.__doc__.splitlines() if line.split()[:1] == [name]
        )
        assert format_loss.replace("not run", "–").split() == [row[column] for row in rows], name


def test_a_file_has_the_table_between_its_marks(tmp_path):
    assert results.write_markdown(RECORDS, tmp_path / "new" / "results.md")
    assert not results.write_markdown(tmp_path, tmp_path / "empty.md")
    assert not (tmp_path / "empty.md").exists()
    assert (
        tmp_path / "new" / "results.md"
    ).read_text() == f"{results.BEGIN}\n{results.make_table(RECORDS)}\n{results.END}\n"
