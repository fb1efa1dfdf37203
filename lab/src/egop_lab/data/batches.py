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
        # Gather many batches per call, which is faster, but not all, which would double the memory.
        for rows in order.split(self._size * _GATHERED):
            yield from zip(*(tensor[rows].split(self._size) for tensor in self._tensors), strict=True)
