"""Fashion-MNIST: found in a folder or downloaded, and checked before use."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from egop_lab.data.batches import DataSet, Split
from egop_lab.data.missing import MissingDataError
from egop_lab.files import replace_atomically

# Checksums of the unpacked files: distributors pack the same images differently.
_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


_DEBIAN = Path("/usr/share/datasets/fashion-mnist")


_URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"


_ADVICE = "Run 'apt-get install dataset-fashion-mnist', or name a folder that has its four idx files: --data DIR."


def fashion_mnist(folder: str | Path | None = None) -> DataSet:
    """Load Fashion-MNIST, split as in the paper: 60000 to train; of the other 10000, 2500 to validate, 7500 to test.

    Pictures of clothing: 28 x 28 as 784 numbers in [0, 1] (float32), labels 0 to 9 (int64).

    The four idx files, packed or not, are looked for in ``folder``, in its sub-folders ``fashion-mnist`` and
    ``FashionMNIST/raw``, where Debian's package ``dataset-fashion-mnist`` puts them, and in the user's cache; else they
    are downloaded, into ``folder`` where one is given, else into the cache. They are checked before use.

    Raises:
        MissingDataError: When the files are nowhere and cannot be downloaded, or one is not what it should be.
    """
    train, held_out = (_split(kind, folder) for kind in ("train", "t10k"))
    return DataSet(train, *held_out.cut(len(held_out) // 4))


def fashion_folder(folder: str | Path | None = None) -> Path:
    """Return the folder from which :func:`fashion_mnist` reads the images, or to which it downloads them."""
    return _path("train-images-idx3-ubyte", folder).parent


def four_classes(data: DataSet) -> DataSet:
    """Load the small version for the paper's spectra: classes 0 to 3, the largest pixel of each 2 x 2, 196 features.

    Of the real data set 24000 to train, 1000 to validate and 3000 to test.
    """

    def chosen(splits: tuple[Split, ...]) -> Split:
        features, labels = (torch.cat([split.batch[part] for split in splits]) for part in (0, 1))
        rows = labels < 4
        side = math.isqrt(features.shape[1])
        pooled = F.max_pool2d(features[rows].view(-1, 1, side, side), 2).flatten(1)
        return Split(pooled, labels[rows])

    train, held_out = chosen((data.train,)), chosen((data.validation, data.test))
    return DataSet(train, *held_out.cut(len(held_out) // 4))


def _split(kind: str, folder: str | Path | None) -> Split:
    images, labels = (
        _parse_idx(_file(name, folder), name) for name in (f"{kind}-images-idx3-ubyte", f"{kind}-labels-idx1-ubyte")
    )
    return Split(images.flatten(1).to(torch.float32) / 255, labels.to(torch.int64))


def _path(name: str, folder: str | Path | None) -> Path:
    """Return the path of one of the four files, or where to download it to."""
    given = (
        [] if folder is None else [Path(folder), Path(folder) / "fashion-mnist", Path(folder) / "FashionMNIST" / "raw"]
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "egop" / "fashion-mnist"
    paths = [place / f for place in (*given, _DEBIAN, cache) for f in (name, f"{name}.gz")]
    return next((path for path in paths if path.is_file()), (given[1] if given else cache) / f"{name}.gz")


def _file(name: str, folder: str | Path | None) -> bytes:
    """Return the unpacked content of one of the four files, checked."""
    path = _path(name, folder)
    if not path.is_file():
        return _check(_download(name, path), name, path)
    try:
        return _check(path.read_bytes(), name, path)
    except OSError as error:
        raise MissingDataError(f"Fashion-MNIST: {path} cannot be read ({error}). {_ADVICE}") from error


def _download(name: str, path: Path) -> bytes:
    url = f"{_URL}/{name}.gz"
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            content: bytes = answer.read()
    except OSError as error:
        raise MissingDataError(
            f"Fashion-MNIST is not on this machine and cannot be downloaded ({error}). {_ADVICE}"
        ) from error
    _check(content, name, url)
    with replace_atomically(path) as beside:
        beside.write_bytes(content)
    return content


def _check(content: bytes, name: str, source: str | Path) -> bytes:
    """Unpack and compare with the checksum."""
    try:
        plain = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise MissingDataError(f"Fashion-MNIST: {source} cannot be unpacked ({error}). {_ADVICE}") from error
    sha = hashlib.sha256(plain).hexdigest()
    if sha != _SHA256[name]:
        raise MissingDataError(
            f"Fashion-MNIST: {source} is damaged: unpacked, its SHA-256 is {sha}, expected {_SHA256[name]}. {_ADVICE}"
        )
    return plain


def _parse_idx(content: bytes, name: str) -> Tensor:
    """Parse the idx format: two zeros, the type (8: bytes), the number of dimensions, their sizes, the data."""
    zeros, kind, dimensions = struct.unpack(">HBB", content[:4]) if len(content) >= 4 else (1, 0, 0)
    start = 4 + 4 * dimensions
    if zeros or kind != 8 or len(content) < start:
        raise ValueError(f"{name} is not an idx file of bytes: it starts with {content[:4].hex() or 'nothing'}.")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{name} announces {math.prod(shape)} entries, {shape}, but has {len(content) - start}.")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())
