"""The mean outer product of many rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from egop.numerics.eigen import eigenbasis, eigenbasis_from_rows, row_noise

# float64 copies of rows are made in slices of at most this size.
_SLICE_BYTES = 256 * 2**20


class OuterProducts:
    """The mean outer product of rows that arrive in chunks, kept as a matrix once there are as many rows as dimensions.

    All rows of one gradient count as one draw, because they may be correlated. The differences between draws show how
    much of the result is chance, so the squared norms of the draws' own matrices are summed as well.

    Args:
        dimension: length of a row.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.rows: list[Tensor] = []
        self.total: Tensor | None = None
        self.count = 0
        self.draws = 0
        self.noise = 0.0  # largest relative eigenvalue that rounding of these rows can cause
        self.fourth: Tensor | float = 0.0  # Σ ‖Gᵀ G‖² over the draws G; stays on the device to avoid waiting for it

    def add(self, rows: Tensor, draws: int | None = None) -> None:
        """Add the rows of several draws, in order and with equally many rows each. By default every row is a draw."""
        draws = len(rows) if draws is None else draws
        if draws:
            self.draws += draws
            self.fourth = self.fourth + _sum_squared_norms(rows.unflatten(0, (draws, -1)))
        self.rows.append(rows)
        self.count += len(rows)
        self.noise = row_noise(rows.dtype)
        if self.total is not None or self.count >= self.dimension:
            self._fold()

    def merge(self, other: OuterProducts) -> None:
        """Add everything that another instance has seen."""
        self.count += other.count
        self.draws += other.draws
        self.noise = max(self.noise, other.noise)
        self.fourth = self.fourth + other.fourth
        if self.total is None and other.total is None and self.count < self.dimension:
            self.rows += other.rows
            return
        self._fold()
        addition = _sum_outer_products(other.rows) if other.total is None else other.total
        if addition is not None:
            self.total = addition.clone() if self.total is None else self.total + addition

    def anisotropy(self, values: Tensor) -> tuple[float, float] | None:
        """Measure how far the eigenvalues are from being equal, and how much of that is not chance.

        ‖P‖² / (tr P)² − 1/d is zero for a flat spectrum. In the mean of M draws, chance adds to ‖P‖² the product of
        each draw with itself. The products of different draws are the unbiased remainder.

        Args:
            values: eigenvalues of the mean outer product.

        Returns:
            The part that is not chance, which may be slightly negative, and the whole; None with fewer than two draws
            or a flat spectrum.
        """
        trace = float(values.sum())
        if self.draws < 2 or not trace > 0:
            return None
        squares = float(values.square().sum()) / trace**2
        alone = float(self.fourth) / (self.count * trace) ** 2
        whole = squares - 1 / self.dimension
        if whole <= 1e-12:
            return None
        return (squares - alone) * self.draws / (self.draws - 1) - 1 / self.dimension, whole

    def eigenbasis(self) -> tuple[Tensor, Tensor]:
        """Return the eigenvalues and eigenvectors of the mean outer product."""
        if self.total is None:
            return eigenbasis_from_rows(torch.cat(self.rows))
        return eigenbasis(self.total / self.count, self.noise)

    def _fold(self) -> None:
        """Replace the rows by the sum of their outer products."""
        self.total = _sum_outer_products(self.rows, self.total)
        self.rows = []


def _sum_outer_products(rows: Sequence[Tensor], total: Tensor | None = None) -> Tensor | None:
    """Add the outer products of rows to a matrix, in place, and return it; without a matrix, create one if needed."""
    for part in rows:
        dimension = part.shape[1]
        total = part.new_zeros(dimension, dimension, dtype=torch.float64) if total is None else total
        # In float64: a float32 product loses eigenvalues below about 1e-8 of the largest.
        for piece in part.split(max(1, _SLICE_BYTES // (8 * dimension))):
            total.addmm_(piece.double().mT, piece.double())
    return total


def _sum_squared_norms(draws: Tensor) -> Tensor:
    """Sum ‖Gᵀ G‖² over matrices G, in float64, by way of the smaller of Gᵀ G and G Gᵀ."""
    _, rows, columns = draws.shape
    if rows == 1:
        return draws.double().square().sum(-1).square().sum()
    total = torch.zeros((), dtype=torch.float64, device=draws.device)
    for part in draws.split(max(1, _SLICE_BYTES // (8 * rows * columns))):
        matrices = part.double()
        total += (matrices @ matrices.mT if rows <= columns else matrices.mT @ matrices).square().sum()
    return total
