"""Data sets: digits ship with the package, Fashion-MNIST is looked for; and minibatches of tensors held in memory."""

import gzip
import hashlib
import math
import os
import struct
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from egop.runs import replacing
from egop_lab.experiments.base import MissingDataError

__all__ = ["Batches", "Digits", "FashionMNIST", "Split", "digits", "fashion_folder", "fashion_mnist", "four_classes"]

_SHA256 = {
    "optdigits.tra": "e1b683cc211604fe8fd8c4417e6a69f31380e0c61d4af22e93cc21e9257ffedd",
    "optdigits.tes": "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8",
}
_LARGEST_COUNT = 16
_GATHERED = 64  # batches that are gathered at a time
_VALIDATION_SIZE = 598

# Of the unpacked files: the same images are packed differently by different distributors.
_FASHION_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_FASHION_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_FASHION_URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
_FASHION_ADVICE = (
    "Run 'apt-get install dataset-fashion-mnist', or name a folder that has its four idx files: --data DIR."
)


@dataclass(frozen=True)
class Split:
    """Examples that belong together: one row of features and one label each."""

    features: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """The whole split as one batch."""
        return self.features, self.labels


@dataclass(frozen=True)
class Digits:
    """The UCI digits: 8 x 8 images as 64 numbers in [0, 1] (float32), labels 0 to 9 (int64)."""

    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True)
class FashionMNIST:
    """Pictures of clothing: 28 x 28 as 784 numbers in [0, 1] (float32), labels 0 to 9 (int64)."""

    train: Split
    validation: Split
    test: Split


class Batches:
    """Minibatches of tensors held in memory, in a new order on every pass.

    Much cheaper than a ``DataLoader`` when the data are already tensors. Each ``iter(...)`` draws its order from the
    generator, so two sources whose generators have the same seed give the same batches, pass by pass.

    Args:
        *tensors: Tensors with the same number of rows; a batch is a tuple with some rows of each.
        size: Rows in a batch.
        generator: Source of the orders. A CPU generator serves tensors on any device.
        drop_last: Leave out the last batch of a pass when it is smaller than ``size``.

    Example:
        >>> source = Batches(torch.arange(5), size=2, generator=torch.Generator().manual_seed(0))
        >>> [len(rows) for (rows,) in source]
        [2, 2, 1]
    """

    def __init__(self, *tensors: Tensor, size: int, generator: torch.Generator, drop_last: bool = False) -> None:
        if not tensors:
            raise ValueError("Batches needs at least one tensor.")
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) > 1:
            raise ValueError(f"Batches needs tensors with the same number of rows, but they have {lengths}.")
        if size < 1:
            raise ValueError(f"Invalid size value: {size}. Must be at least 1.")
        if lengths[0] < (size if drop_last else 1):
            raise ValueError(f"{lengths[0]} rows give no batch of {size} with drop_last={drop_last}.")
        self._tensors = tensors
        self._size = size
        self._generator = generator
        self._rows = lengths[0] - lengths[0] % size if drop_last else lengths[0]

    def __len__(self) -> int:
        return -(-self._rows // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = torch.randperm(len(self._tensors[0]), generator=self._generator, device=self._generator.device)
        order = order[: self._rows].to(self._tensors[0].device)
        # Gathered many batches at a time, since a call costs more than the rows; not all, which would double the data.
        for rows in order.split(self._size * _GATHERED):
            yield from zip(*(tensor[rows].split(self._size) for tensor in self._tensors), strict=True)


def digits() -> Digits:
    """The UCI handwritten digits, split as in the paper: 3823 to train, 598 to validate, 1199 to test.

    The files ship with the package (see the README beside them for authors and licence) and are checked before use.

    Raises:
        RuntimeError: When a file is missing or is not the one that was shipped.
    """
    train = _read("optdigits.tra")
    other = _read("optdigits.tes")
    return Digits(
        train=train,
        validation=Split(other.features[:_VALIDATION_SIZE], other.labels[:_VALIDATION_SIZE]),
        test=Split(other.features[_VALIDATION_SIZE:], other.labels[_VALIDATION_SIZE:]),
    )


def _read(name: str) -> Split:
    file = resources.files(__package__) / "optdigits" / name
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RuntimeError(f"The data file {file} cannot be read ({error}). Reinstall egop-lab.") from error
    found = hashlib.sha256(content).hexdigest()
    if found != _SHA256[name]:
        raise RuntimeError(
            f"The data file {file} is damaged: its SHA-256 is {found}, expected {_SHA256[name]}. Reinstall egop-lab."
        )
    table = torch.from_numpy(np.loadtxt(content.decode("ascii").splitlines(), delimiter=",", dtype=np.int64))
    return Split(features=table[:, :-1].to(torch.float32) / _LARGEST_COUNT, labels=table[:, -1].contiguous())


def fashion_mnist(folder: str | Path | None = None) -> FashionMNIST:
    """Fashion-MNIST, split as in the paper: 60000 to train; of the 10000 others 2500 to validate, 7500 to test.

    The four idx files, packed or not, are looked for in ``folder``, in its sub-folders ``fashion-mnist`` and
    ``FashionMNIST/raw``, where Debian's package ``dataset-fashion-mnist`` puts them, and in the user's cache; else they
    are downloaded, into ``folder`` where one is given, else into the cache. They are checked before use.

    Raises:
        MissingDataError: When the files are nowhere and cannot be downloaded, or one is not what it should be.
    """
    train, other = (_fashion_split(kind, folder) for kind in ("train", "t10k"))
    middle = len(other) // 4
    return FashionMNIST(
        train,
        validation=Split(other.features[:middle], other.labels[:middle]),
        test=Split(other.features[middle:], other.labels[middle:]),
    )


def fashion_folder(folder: str | Path | None = None) -> Path:
    """Where the images of :func:`fashion_mnist` come from, or will be put."""
    return _fashion_path("train-images-idx3-ubyte", folder).parent


def four_classes(data: FashionMNIST) -> FashionMNIST:
    """The small version of the paper's spectra: classes 0 to 3, the largest pixel of each 2 x 2, 196 numbers each.

    Of the real data set 24000 to train, 1000 to validate and 3000 to test.
    """

    def chosen(splits: tuple[Split, ...]) -> Split:
        features, labels = (torch.cat([split.batch[part] for split in splits]) for part in (0, 1))
        rows = labels < 4
        side = math.isqrt(features.shape[1])
        pooled = F.max_pool2d(features[rows].view(-1, 1, side, side), 2).flatten(1)
        return Split(pooled, labels[rows])

    train, other = chosen((data.train,)), chosen((data.validation, data.test))
    middle = len(other) // 4
    return FashionMNIST(
        train,
        validation=Split(other.features[:middle], other.labels[:middle]),
        test=Split(other.features[middle:], other.labels[middle:]),
    )


def _fashion_split(kind: str, folder: str | Path | None) -> Split:
    images, labels = (
        _parse_idx(_fashion_file(name, folder), name)
        for name in (f"{kind}-images-idx3-ubyte", f"{kind}-labels-idx1-ubyte")
    )
    return Split(images.flatten(1).to(torch.float32) / 255, labels.to(torch.int64))


def _fashion_path(name: str, folder: str | Path | None) -> Path:
    """Where one of the four files is, or else is to be put."""
    given = (
        [] if folder is None else [Path(folder), Path(folder) / "fashion-mnist", Path(folder) / "FashionMNIST" / "raw"]
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "egop" / "fashion-mnist"
    paths = [place / f for place in (*given, _FASHION_DEBIAN, cache) for f in (name, f"{name}.gz")]
    return next((path for path in paths if path.is_file()), (given[1] if given else cache) / f"{name}.gz")


def _fashion_file(name: str, folder: str | Path | None) -> bytes:
    """The unpacked content of one of the four files, checked."""
    path = _fashion_path(name, folder)
    if not path.is_file():
        return _checked(_download(name, path), name, path)
    try:
        return _checked(path.read_bytes(), name, path)
    except OSError as error:
        raise MissingDataError(f"Fashion-MNIST: {path} cannot be read ({error}). {_FASHION_ADVICE}") from error


def _download(name: str, path: Path) -> bytes:
    url = f"{_FASHION_URL}/{name}.gz"
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            content: bytes = answer.read()
    except OSError as error:
        raise MissingDataError(
            f"Fashion-MNIST is not on this machine and cannot be downloaded ({error}). {_FASHION_ADVICE}"
        ) from error
    _checked(content, name, url)
    with replacing(path) as beside:
        beside.write_bytes(content)
    return content


def _checked(content: bytes, name: str, source: str | Path) -> bytes:
    """Unpack and compare with the checksum."""
    try:
        plain = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise MissingDataError(f"Fashion-MNIST: {source} cannot be unpacked ({error}). {_FASHION_ADVICE}") from error
    found = hashlib.sha256(plain).hexdigest()
    if found != _FASHION_SHA256[name]:
        raise MissingDataError(
            f"Fashion-MNIST: {source} is damaged: unpacked, its SHA-256 is {found}, "
            f"expected {_FASHION_SHA256[name]}. {_FASHION_ADVICE}"
        )
    return plain


def _parse_idx(content: bytes, name: str) -> Tensor:
    """A tensor from the idx format: two zeros, the type (8: bytes), the number of dimensions, their sizes, the data."""
    zeros, kind, dimensions = struct.unpack(">HBB", content[:4]) if len(content) >= 4 else (1, 0, 0)
    start = 4 + 4 * dimensions
    if zeros or kind != 8 or len(content) < start:
        raise ValueError(f"{name} is not an idx file of bytes: it starts with {content[:4].hex() or 'nothing'}.")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{name} announces {math.prod(shape)} entries, {shape}, but has {len(content) - start}.")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())
