"""Fashion-MNIST: found in a folder, and checked before use."""

import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from egop_lab.data.batches import DataSet, Split
from egop_lab.data.missing import MissingDataError

# Checksums of the unpacked files: distributors pack the same images differently.
_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_ADVICE = (
    "Run 'apt-get install dataset-fashion-mnist', or name a folder that has its four idx files: --data DIR. They are "
    "at https://github.com/zalandoresearch/fashion-mnist."
)


def fashion_mnist(folder: str | Path | None = None) -> DataSet:
    """Load Fashion-MNIST, split as in the paper: 60000 to train; of the other 10000, 2500 to validate, 7500 to test.

    Pictures of clothing: 28 x 28 as 784 numbers in [0, 1] (float32), labels 0 to 9 (int64).

    The four idx files, packed or not, are looked for in ``folder``, in its sub-folders ``fashion-mnist`` and
    ``FashionMNIST/raw``, and where Debian's package ``dataset-fashion-mnist`` puts them. They are checked before use.

    Raises:
        MissingDataError: When the files are nowhere, or one is not what it should be.
    """
    train, held_out = (_split(kind, folder) for kind in ("train", "t10k"))
    return DataSet(train, *held_out.cut(len(held_out) // 4))


def fashion_folder(folder: str | Path | None = None) -> Path:
    """Return the folder from which :func:`fashion_mnist` reads the images."""
    return _path("train-images-idx3-ubyte", folder).parent


def four_classes(data: DataSet) -> DataSet:
    """Return the small version for the paper's spectra: classes 0 to 3, the largest pixel of each 2 x 2, 196 features.

    Of the real data set 24000 to train, 1000 to validate and 3000 to test.
    """

    def pool(*splits: Split) -> Split:
        features, labels = (torch.cat([split.batch[part] for split in splits]) for part in (0, 1))
        rows = labels < 4
        side = math.isqrt(features.shape[1])
        pooled = F.max_pool2d(features[rows].view(-1, 1, side, side), 2).flatten(1)
        return Split(pooled, labels[rows])

    train, held_out = pool(data.train), pool(data.validation, data.test)
    return DataSet(train, *held_out.cut(len(held_out) // 4))


def _split(kind: str, folder: str | Path | None) -> Split:
    images, labels = (_parse_file(f"{kind}-{part}-ubyte", folder) for part in ("images-idx3", "labels-idx1"))
    return Split(images.flatten(1).to(torch.float32) / 255, labels.to(torch.int64))


def _path(name: str, folder: str | Path | None) -> Path:
    places = [] if folder is None else [Path(folder, inside) for inside in ("", "fashion-mnist", "FashionMNIST/raw")]
    paths = [place / file for place in (*places, _DEBIAN) for file in (name, f"{name}.gz")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise MissingDataError(f"Fashion-MNIST is not on this machine. {_ADVICE}")
    return path


def _parse_file(name: str, folder: str | Path | None) -> Tensor:
    """Read the idx format: two zeros, the type (8: bytes), the number of dimensions, their sizes, the data."""
    path = _path(name, folder)
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise MissingDataError(f"Fashion-MNIST: {path} cannot be read ({error}). {_ADVICE}") from error
    if hashlib.sha256(content).hexdigest() != _SHA256[name]:
        raise MissingDataError(f"Fashion-MNIST: {path} is damaged: its SHA-256 is not the expected one. {_ADVICE}")
    start = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())
