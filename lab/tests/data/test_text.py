"""Text as bytes: where it is found, and windows of it."""

from __future__ import annotations

import gzip

import pytest
import torch

from egop_lab.data.missing import MissingDataError
from egop_lab.data.text import Text, Windows, load

CPU = torch.device("cpu")


def test_text_is_found_where_it_may_be(tmp_path):
    def both(place):
        found = load(str(place), CPU, smallest=1)
        return bytes(found.train), bytes(found.validation)

    (tmp_path / "book.txt").write_bytes(bytes(range(100)))
    assert both(tmp_path / "book.txt") == (bytes(range(90)), bytes(range(90, 100))), "the last tenth validates"
    assert both(tmp_path) == both(tmp_path / "book.txt")
    inside = tmp_path / "text" / "wikitext-2"
    inside.mkdir(parents=True)
    (inside / "train.articles.txt.gz").write_bytes(gzip.compress(b"to train"))
    (inside / "valid.txt.gz").write_bytes(gzip.compress(b"to validate"))
    (inside / "test.txt").write_bytes(b"not used")
    assert both(tmp_path) == both(inside) == (b"to train", b"to validate"), "two parts come before one file"


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
    with pytest.raises(MissingDataError, match=r"text\.txt\.gz cannot be read .* with --data PATH"):
        load(str(tmp_path), CPU, smallest=1)
