"""Examples that belong together, and minibatches of tensors held in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_GATHERED = 64  # batches to gather at a time


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

    def cut(self, rows: int) -> tuple[Split, Split]:
        """Split off the first examples."""
        return Split(self.features[:rows], self.labels[:rows]), Split(self.features[rows:], self.labels[rows:])


@dataclass(frozen=True)
class DataSet:
    """Examples for training, validation and testing."""

    train: Split
    validation: Split
    test: Split

    def to(self, device: torch.device | str) -> list[tuple[Tensor, ...]]:
        """Return features and labels of the three splits, moved to a device."""
        splits = (self.train, self.validation, self.test)
        return [tuple(tensor.to(device) for tensor in split.batch) for split in splits]


class Batches:
    """Minibatches of tensors held in memory, in a new order on every pass.

    Much cheaper than a ``DataLoader`` when the data are already tensors. Each ``iter(...)`` draws its order from the
    generator, so two sources whose generators have the same seed give the same batches, pass by pass.

    The tensors have the same number of rows; a batch is a tuple with ``size`` rows of each, the last one of a pass with
    fewer unless ``drop_last`` leaves it out.

    Example:
        >>> source = Batches(torch.arange(5), size=2, generator=torch.Generator().manual_seed(0))
        >>> [len(rows) for (rows,) in source]
        [2, 2, 1]
    """

    def __init__(self, *tensors: Tensor, size: int, generator: torch.Generator, drop_last: bool = False) -> None:
        self._tensors, self._size, self._generator = tensors, size, generator
        rows = len(tensors[0])
        self._rows = rows - rows % size if drop_last else rows

    def __len__(self) -> int:
        return -(-self._rows // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = torch.randperm(len(self._tensors[0]), generator=self._generator, device=self._generator.device)
        order = order[: self._rows].to(self._tensors[0].device)
        # Gather many batches per call, which is faster, but not all, which would double the memory.
        for rows in order.split(self._size * _GATHERED):
            yield from zip(*(tensor[rows].split(self._size) for tensor in self._tensors), strict=True)
