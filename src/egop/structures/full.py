"""Full: the dense eigenbasis of a block, the method as the paper states it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from egop import linalg
from egop.partition import Block
from egop.spectrum import Spectrum
from egop.structures.base import (
    Accumulator,
    ChangeOfBasis,
    Coordinates,
    Cost,
    Structure,
    as_tuple,
    flatten,
    unflatten,
)


class FullChange(ChangeOfBasis):
    """``decode(c) = V c`` over all entries of the block as one vector."""

    kind = "Full"

    def check(self) -> None:
        basis = self.tensors["basis"]
        if basis.shape[-2:] != (self.block.size, self.block.size):
            raise ValueError(
                f"Block '{self.block.name}' of {self.block.size} entries needs a basis of shape "
                f"{(self.block.size, self.block.size)}, got {tuple(basis.shape[-2:])}."
            )

    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        vector = flatten(tensors, self.block)
        return (_rows_times(vector, self.tensors["basis"]),)

    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        (vector,) = as_tuple(coordinates)
        return unflatten(_rows_times(vector, self.tensors["basis"].mT), self.block)

    @property
    def cost_per_step(self) -> int:
        return 4 * self.block.size**2

    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        return (torch.Size([self.block.size]),)

    def dense(self) -> Tensor:
        return self.tensors["basis"].double()


def _rows_times(vector: Tensor, matrix: Tensor) -> Tensor:
    """``vector @ matrix``, both with leading dimensions: one row each for one matrix, or a matrix for each row."""
    if matrix.dim() == 2:
        return vector @ matrix
    return (vector.unsqueeze(-2) @ matrix).squeeze(-2)


@dataclass(frozen=True, kw_only=True)
class Full(Structure):
    """One dense eigenbasis for the whole block.

    Args:
        route: ``"eigh"`` accumulates the d x d matrix and decomposes it; ``"svd"`` keeps all M gradients and
            decomposes those; ``"auto"`` takes the second while there are fewer gradients than dimensions.
    """

    route: Literal["auto", "eigh", "svd"] = "auto"

    def __post_init__(self) -> None:
        if self.route not in ("auto", "eigh", "svd"):
            raise ValueError(f"Invalid route value: {self.route!r}. Must be 'auto', 'eigh' or 'svd'.")

    def samples(self, block: Block) -> int:
        return block.size

    def cost(self, block: Block) -> Cost:
        return Cost(bytes=block.size**2 * block.dtype.itemsize, flops=4 * block.size**2)

    def accumulator(self, block: Block) -> Accumulator:
        return _FullAccumulator(block, self.route)


class _FullAccumulator(Accumulator):
    """Gradients as rows while they are few, then the sum of their outer products."""

    def __init__(self, block: Block, route: str) -> None:
        self.block = block
        self.route = route
        self.rows: list[Tensor] = []
        self.outer: Tensor | None = None  # the sum of outer products
        self.count = 0

    def add(self, gradients: Sequence[Tensor]) -> None:
        self._take(flatten(gradients, self.block).detach().clone())

    def merge(self, other: Self) -> None:
        for rows in other.rows:
            self._take(rows)
        if other.outer is not None:
            self._fold()
            self.outer = other.outer.clone() if self.outer is None else self.outer + other.outer
            self.count += other.count - sum(len(rows) for rows in other.rows)

    def finish(self) -> tuple[Spectrum, ChangeOfBasis]:
        if self.count == 0:
            raise ValueError(f"Block '{self.block.name}' has seen no gradients.")
        if self.outer is None:
            values, vectors = linalg.eigenbasis_of_rows(torch.cat(self.rows))
        else:
            values, vectors = linalg.eigenbasis(self.outer / self.count)
        density = vectors.abs().sum(0).square() / len(vectors)
        change = FullChange(self.block, {"basis": vectors.to(self.block.dtype)})
        return Spectrum(values, density, self.count), change

    def _take(self, rows: Tensor) -> None:
        self.rows.append(rows)
        self.count += len(rows)
        enough = self.route == "auto" and self.count >= self.block.size
        if self.route == "eigh" or enough or self.outer is not None:
            self._fold()

    def _fold(self) -> None:
        for rows in self.rows:
            double = rows.double()
            if self.outer is None:
                self.outer = double.new_zeros(self.block.size, self.block.size)
            self.outer.addmm_(double.mT, double)
        self.rows.clear()
