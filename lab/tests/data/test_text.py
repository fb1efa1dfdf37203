"""Text as bytes: where it is found, and windows of it."""

from __future__ import annotations

import gzip

import pytest
import torch

from egop_lab.data.missing import MissingDataError
from egop_lab.data.text import Text, Windows, load


def test_a_folder_has_two_parts_or_one_file_whose_last_tenth_validates(tmp_path):
    def both():
        found = load(tmp_path)
        return bytes(found.train), bytes(found.validation)

    with pytest.raises(MissingDataError, match="There is no text at"):
        load(tmp_path)
    (tmp_path / "book.txt").write_bytes(bytes(range(100)))
    assert both() == (bytes(range(90)), bytes(range(90, 100)))
    assert bytes(load(tmp_path / "book.txt").train) == bytes(range(90))
    (tmp_path / "train.articles.txt.gz").write_bytes(gzip.compress(b"to train"))
    (tmp_path / "valid.txt.gz").write_bytes(gzip.compress(b"to validate"))
    assert both() == (b"to train", b"to validate"), "two parts come before one file"


def test_windows_of_the_validation_text_are_spread_and_do_not_overlap():
    text = Text(torch.zeros(5), torch.arange(100))
    assert text.windows(9, 5).tolist() == [list(range(first, first + 9)) for first in (0, 18, 36, 54, 72)]
    assert len(text.windows(9, 10**9)) == 11


def test_windows_for_training_come_from_all_of_the_text():
    source = Windows(torch.arange(5), length=3, size=50, count=2, seed=0)
    first, second = source
    assert {tuple(row) for row in first.tolist()} == {(0, 1, 2), (1, 2, 3), (2, 3, 4)}
    assert not torch.equal(first, second)
    assert not torch.equal(next(iter(source)), first), "another pass has other places"


def test_damaged_text_is_said_in_one_line(tmp_path):
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(b"text" * 100)[:20])
    with pytest.raises(MissingDataError, match=r"text\.txt\.gz cannot be read"):
        load(tmp_path)
