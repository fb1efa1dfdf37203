"""The mean outer product of many rows, which may be spread over processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from egop.distributed import Holding, gather_rows, sum_to_owner
from egop.numerics.eigen import eigenbasis, eigenbasis_from_rows, row_noise

# float64 copies of rows are made in slices of at most this size.
_SLICE_BYTES = 256 * 2**20


class OuterProducts:
    """The mean outer product of rows that arrive in chunks: kept as rows while there are few, then as a matrix.

    All rows of one gradient count as one draw, because they may be correlated. The differences between draws show how
    much of the result is chance, so the squared norms of the draws' own matrices are summed as well.

    Args:
        dimension: length of a row.
        route: ``"eigh"`` sums the matrix and decomposes it; ``"svd"`` keeps all rows and decomposes those; ``"auto"``
            uses ``"svd"`` while there are fewer rows than dimensions.
    """

    def __init__(self, dimension: int, route: str = "auto") -> None:
        self.dimension = dimension
        self.route = route
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
        self._keep(rows)

    def merge(self, other: OuterProducts) -> None:
        """Add everything that another instance has seen."""
        count, draws, fourth = self.count + other.count, self.draws + other.draws, self.fourth + other.fourth
        for rows in other.rows:
            self._keep(rows)
        if other.total is not None:
            self._fold()
            self.total = other.total.clone() if self.total is None else self.total + other.total
        self.count, self.draws, self.fourth = count, draws, fourth

    def holding(self) -> Holding:
        """Describe the rows that this process holds."""
        return Holding.describe(self.count, self.rows, self.total is not None, self.draws, float(self.fourth))

    def prepare(self, holdings: Sequence[Holding], device: torch.device) -> None:
        """Do in advance what may fail in :meth:`collect`, given what each process holds and the target device."""
        if any(holding.folded for holding in holdings) or self._should_fold(sum(holding.seen for holding in holdings)):
            self._fold()
            if self.total is None:
                self.total = torch.zeros(self.dimension, self.dimension, dtype=torch.float64, device=device)

    def collect(self, owner: int, holdings: Sequence[Holding], device: torch.device) -> None:
        """Combine what all processes have seen in the owner's process."""
        if self.total is not None:
            sum_to_owner(owner, self.total)
        else:
            rows: list[Tensor] = []
            gather_rows(owner, self.rows, holdings, device, rows.append)
            self.rows = rows
        self.count = sum(holding.seen for holding in holdings)
        self.draws = sum(holding.draws for holding in holdings)
        self.fourth = sum(holding.fourth for holding in holdings)

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

    def _should_fold(self, count: int) -> bool:
        return self.route == "eigh" or (self.route == "auto" and count >= self.dimension)

    def _keep(self, rows: Tensor) -> None:
        self.rows.append(rows)
        self.count += len(rows)
        self.noise = row_noise(rows.dtype)
        if self._should_fold(self.count) or self.total is not None:
            self._fold()

    def _fold(self) -> None:
        """Replace the rows by the sum of their outer products."""
        for rows in self.rows:
            if self.total is None:
                self.total = rows.new_zeros(self.dimension, self.dimension, dtype=torch.float64)
            # In float64: a float32 product loses eigenvalues below about 1e-8 of the largest.
            for part in rows.split(max(1, _SLICE_BYTES // (8 * self.dimension))):
                self.total.addmm_(part.double().mT, part.double())
        self.rows.clear()


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
