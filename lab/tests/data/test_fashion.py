import gzip
import hashlib
import struct

import pytest
import torch

from egop_lab.data import fashion as data
from egop_lab.data.batches import DataSet, Split
from egop_lab.data.fashion import fashion_folder, fashion_mnist, four_classes
from egop_lab.data.missing import MissingDataError

NAMES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


def idx(values):
    head = struct.pack(f">HBB{values.dim()}I", 0, 8, values.dim(), *values.shape)
    return head + bytes(values.flatten().tolist())


@pytest.fixture
def contents(monkeypatch, tmp_path):
    """Make four tiny idx files with the expected checksums, and hide all other copies."""
    made = {}
    for kind, count in (("train", 6), ("t10k", 8)):
        made[f"{kind}-images-idx3-ubyte"] = idx(torch.arange(count * 16).view(count, 4, 4) * 2 % 256)
        made[f"{kind}-labels-idx1-ubyte"] = idx(torch.arange(count) % 10)
    monkeypatch.setattr(data, "_SHA256", {k: hashlib.sha256(v).hexdigest() for k, v in made.items()})
    monkeypatch.setattr(data, "_DEBIAN", tmp_path / "no such package")
    return made


def write(folder, contents, packed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", ["", "fashion-mnist", "FashionMNIST/raw"])
def test_files_are_found_in_a_named_folder_packed_or_not(contents, tmp_path, packed, place):
    write(tmp_path / "data" / place, contents, packed)
    found = fashion_mnist(tmp_path / "data")
    assert fashion_folder(tmp_path / "data") == tmp_path / "data" / place
    assert (len(found.train), len(found.validation), len(found.test)) == (6, 2, 6)
    assert found.train.features.dtype == torch.float32
    assert found.train.features[1].mul(255).round().tolist() == [2.0 * k for k in range(16, 32)]
    assert found.test.labels.tolist() == [2, 3, 4, 5, 6, 7]
    assert found.test.labels.dtype == torch.int64


def test_files_are_found_where_debian_puts_them(contents, tmp_path, monkeypatch):
    write(tmp_path / "debian", contents)
    monkeypatch.setattr(data, "_DEBIAN", tmp_path / "debian")
    assert len(fashion_mnist().train) == 6
    assert len(fashion_mnist(tmp_path / "a folder without them").train) == 6
    assert fashion_folder(tmp_path / "a folder without them") == tmp_path / "debian"


def test_missing_files_say_in_one_line_what_to_do(contents, tmp_path):
    with pytest.raises(MissingDataError) as raised:
        fashion_mnist(tmp_path)
    message = str(raised.value)
    assert "\n" not in message
    assert "apt-get install dataset-fashion-mnist" in message
    assert "--data DIR" in message


@pytest.mark.parametrize("damage", [lambda c: c + b"x", lambda c: gzip.compress(c)[:-9], lambda c: b""])
def test_a_damaged_file_is_named_and_not_used(contents, tmp_path, damage):
    write(tmp_path, contents)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(damage(contents["t10k-labels-idx1-ubyte"]))
    with pytest.raises(MissingDataError, match=r"t10k-labels-idx1-ubyte\.gz (is damaged|cannot be read)"):
        fashion_mnist(tmp_path)


def test_four_classes_are_kept_and_pooled():
    images = torch.zeros(12, 28, 28)
    images[:, 2, 5] = torch.arange(12.0)
    labels = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 0])
    split = Split(images.flatten(1), labels)
    found = four_classes(DataSet(split, Split(images[:4].flatten(1), labels[:4]), split))
    assert found.train.labels.tolist() == [0, 1, 2, 3, 3, 0]
    assert found.train.features.shape == (6, 196)
    assert found.train.features.view(6, 14, 14)[:, 1, 2].tolist() == [0, 1, 2, 3, 10, 11]
    assert found.train.features.sum() == 27
    assert (len(found.validation), len(found.test)) == (2, 8)


def test_the_real_data_set_is_split_as_in_the_paper():
    if not data._DEBIAN.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    found = fashion_mnist()
    assert (len(found.train), len(found.validation), len(found.test)) == (60_000, 2500, 7500)
    assert found.train.features.shape == (60_000, 784)
    assert (found.train.features.min(), found.train.features.max()) == (0, 1)
    assert found.train.labels.bincount().tolist() == [6000] * 10
    small = four_classes(found)
    assert (len(small.train), len(small.validation), len(small.test)) == (24_000, 1000, 3000)
