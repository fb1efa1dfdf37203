"""Data sets that ship with the package, and minibatches of tensors held in memory."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import numpy as np
import torch
from torch import Tensor

__all__ = ["Batches", "Digits", "Split", "digits"]

_SHA256 = {
    "optdigits.tra": "e1b683cc211604fe8fd8c4417e6a69f31380e0c61d4af22e93cc21e9257ffedd",
    "optdigits.tes": "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8",
}
_LARGEST_COUNT = 16
_VALIDATION_SIZE = 598


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
        for rows in order.split(self._size):
            yield tuple(tensor[rows] for tensor in self._tensors)


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
        raise RuntimeError(f"The data file {file} cannot be read ({error}). Reinstall egop.") from error
    found = hashlib.sha256(content).hexdigest()
    if found != _SHA256[name]:
        raise RuntimeError(
            f"The data file {file} is damaged: its SHA-256 is {found}, expected {_SHA256[name]}. Reinstall egop."
        )
    table = torch.from_numpy(np.loadtxt(content.decode("ascii").splitlines(), delimiter=",", dtype=np.int64))
    return Split(features=table[:, :-1].to(torch.float32) / _LARGEST_COUNT, labels=table[:, -1].contiguous())
