import hashlib
from importlib import resources

import torch

from egop_lab.data.digits import digits


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
