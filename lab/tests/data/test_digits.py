import hashlib
from importlib import resources

import pytest
import torch

from egop_lab.data import digits as data
from egop_lab.data.batches import Batches
from egop_lab.data.digits import digits


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_digits_are_split_as_in_the_paper():
    found = digits()
    assert (len(found.train), len(found.validation), len(found.test)) == (3823, 598, 1199)


def test_digits_are_scaled_float32_with_int64_labels():
    for split in (digits().train, digits().validation, digits().test):
        assert split.features.dtype == torch.float32
        assert split.features.shape == (len(split), 64)
        assert (split.features.min(), split.features.max()) == (0, 1)
        assert split.labels.dtype == torch.int64
        assert split.labels.unique().tolist() == list(range(10))


def test_class_counts_are_those_of_the_authors_description():
    found = digits()
    assert found.train.labels.bincount().tolist() == [376, 389, 380, 389, 387, 376, 377, 387, 380, 382]
    both = torch.cat([found.validation.labels, found.test.labels])
    assert both.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_validation_and_test_keep_the_order_of_the_file():
    lines = (resources.files("egop_lab.data") / "optdigits" / "optdigits.tes").read_text().splitlines()
    found = digits()
    for split, line in ((found.validation, lines[0]), (found.validation, lines[597]), (found.test, lines[598])):
        *features, label = [int(entry) for entry in line.split(",")]
        row = -1 if line == lines[597] else 0
        assert (split.features[row] * 16).tolist() == features
        assert split.labels[row] == label


def test_attribution_ships_with_the_data():
    text = (resources.files("egop_lab.data") / "optdigits" / "README.md").read_text()
    assert "CC BY 4.0" in text
    assert "Alpaydin" in text


def test_the_checksums_in_the_attribution_are_those_of_the_files():
    folder = resources.files("egop_lab.data") / "optdigits"
    text = (folder / "README.md").read_text()
    for name in ("optdigits.tra", "optdigits.tes", "optdigits.names"):
        assert f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}" in text


def damaged(tmp_path, monkeypatch, content):
    folder = tmp_path / "optdigits"
    folder.mkdir()
    if content is not None:
        (folder / "optdigits.tra").write_bytes(content)
    monkeypatch.setattr(data.resources, "files", lambda package: tmp_path)


def test_a_damaged_file_is_named(tmp_path, monkeypatch):
    damaged(tmp_path, monkeypatch, b"0,1,2\n")
    with pytest.raises(RuntimeError, match=r"optdigits\.tra is damaged.*expected e1b683cc.*Reinstall egop-lab"):
        digits()


def test_a_missing_file_is_named(tmp_path, monkeypatch):
    damaged(tmp_path, monkeypatch, None)
    with pytest.raises(RuntimeError, match=r"optdigits\.tra cannot be read.*Reinstall egop-lab"):
        digits()


def test_a_pass_holds_every_row_once():
    rows = torch.arange(3823)
    batches = list(Batches(rows, rows * 2, size=300, generator=seeded()))
    assert [len(first) for first, _ in batches] == [300] * 12 + [223]
    seen = torch.cat([first for first, _ in batches])
    assert torch.equal(seen.sort().values, rows)
    assert all(torch.equal(second, first * 2) for first, second in batches)


def test_batches_are_the_rows_in_a_random_order():
    rows = torch.randn(1000, 3)
    order = torch.randperm(1000, generator=seeded())
    batches = list(Batches(rows, torch.arange(1000), size=3, generator=seeded()))
    for (features, places), expected in zip(batches, order.split(3), strict=True):
        assert torch.equal(features, rows[expected])
        assert torch.equal(places, expected)


@pytest.mark.parametrize(("rows", "drop_last", "expected"), [(6, False, 3), (7, False, 4), (7, True, 3), (6, True, 3)])
def test_length_is_the_number_of_batches(rows, drop_last, expected):
    source = Batches(torch.arange(rows), size=2, generator=seeded(), drop_last=drop_last)
    assert len(source) == len(list(source)) == expected


def test_drop_last_leaves_out_other_rows_on_every_pass():
    source = Batches(torch.arange(5), size=4, generator=seeded(), drop_last=True)
    left_out = {(set(range(5)) - set(rows.tolist())).pop() for _ in range(40) for (rows,) in source}
    assert left_out == set(range(5))


def test_each_pass_has_a_new_order_and_the_seed_decides_it():
    def passes(seed):
        source = Batches(torch.arange(20), size=20, generator=seeded(seed))
        return [next(iter(source))[0].tolist() for _ in range(2)]

    assert passes(0) == passes(0)
    assert passes(0)[0] != passes(0)[1]
    assert passes(0) != passes(1)


def test_batches_leave_the_global_random_state_alone():
    before = torch.get_rng_state()
    list(Batches(torch.arange(20), size=3, generator=seeded()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ((), {"size": 1}, "at least one tensor"),
        ((torch.zeros(2), torch.zeros(3)), {"size": 1}, r"same number of rows, but they have \[2, 3\]"),
        ((torch.zeros(2),), {"size": 0}, "Invalid size value: 0"),
        ((torch.zeros(0),), {"size": 1}, "0 rows give no batch"),
        ((torch.zeros(2),), {"size": 3, "drop_last": True}, "2 rows give no batch of 3"),
    ],
)
def test_impossible_batches_are_refused(tensors, options, message):
    with pytest.raises(ValueError, match=message):
        Batches(*tensors, generator=seeded(), **options)
