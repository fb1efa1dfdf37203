"""Leading directions of many gradients without anything of size d x d: randomized SVD and a streaming sketch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from egop.linalg import fix_signs

# Intermediate float64 copies are made in slices of at most this size.
_SLICE_BYTES = 64 * 2**20
# Directions weaker than this, relative to the strongest, are rounding noise of float32 gradients.
_NOISE = 1e-6


class RowSketch:
    """A bounded summary of any number of rows that keeps their leading directions.

    Rows are kept as they are while they fit. When there are more, they are replaced by the three quarters of them that
    say most about the sum of outer products (a truncated SVD), so whatever follows is seen together with what mattered
    before. Sketches of parts merge into a sketch of the whole.

    Args:
        rank: how many leading directions are wanted.
        capacity: how many rows may be held; at least four times the rank, below that the directions near the cut blur.
    """

    def __init__(self, rank: int, capacity: int) -> None:
        self.rank = rank
        self.capacity = max(4 * rank, capacity)
        self.rows: list[Tensor] = []
        self.count = 0

    @property
    def held(self) -> int:
        """How many rows it holds."""
        return sum(len(rows) for rows in self.rows)

    def add(self, rows: Tensor) -> None:
        """Take in rows."""
        for piece in rows.split(self.capacity - 3 * self.capacity // 4):
            self.rows.append(piece)
            self.count += len(piece)
            if self.held > self.capacity:
                self._compress()

    def merge(self, other: RowSketch) -> None:
        """Take in all that another sketch has seen."""
        seen = self.count + other.count
        for rows in other.rows:
            self.add(rows)
        self.count = seen

    def leading(self, power_iterations: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The leading eigenvalues and orthonormal eigenvectors (columns) of the mean outer product of the rows seen."""
        squares, vectors = leading_directions(self.rows, self.rank, power_iterations, generator)
        return squares / self.count, vectors

    def _compress(self) -> None:
        left, _ = _left_singular(self.rows, 3 * self.capacity // 4)
        compressed = torch.empty(left.shape[1], self.rows[0].shape[1], dtype=self.rows[0].dtype, device=left.device)
        for columns, part in _slices(self.rows):
            compressed[:, columns] = (left.mT @ part).to(compressed.dtype)
        self.rows = [compressed]


def leading_directions(
    rows: Sequence[Tensor], rank: int, power_iterations: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The ``rank`` largest squared singular values of the rows and their right singular vectors, as columns.

    Few rows are decomposed exactly through their inner products. Many go through a randomized range finder with twice
    the rank and power iterations: with little oversampling the directions near the cut are found badly. Directions
    that no row has are filled up with random orthonormal ones.
    """
    count, dimension = sum(len(part) for part in rows), rows[0].shape[1]
    if not all(torch.isfinite(part).all() for part in rows):
        raise torch.linalg.LinAlgError("The gradients to decompose have entries that are not finite.")
    width = min(2 * rank, dimension)
    if count <= width:
        left, values = _left_singular(rows, rank)
        vectors = _adjoint(rows, left)
    else:
        start = torch.randn(count, width, generator=generator, dtype=rows[0].dtype).to(rows[0].device)
        basis = orthonormal_columns(_adjoint(rows, start))
        for _ in range(power_iterations):
            image, _ = torch.linalg.qr(_product(rows, basis).double())
            basis = orthonormal_columns(_adjoint(rows, image.to(basis.dtype)))
        _, singular, right = torch.linalg.svd(_product(rows, basis).double(), full_matrices=False)
        values = singular[:rank].square()
        vectors = basis @ right[:rank].mT.to(basis.dtype)
    return _filled(values, vectors, rank, generator)


def orthonormal_columns(matrix: Tensor, slice_bytes: int = _SLICE_BYTES) -> Tensor:
    """An orthonormal basis of the columns, in their order and dtype; each column keeps its direction as far as it can.

    Small matrices by Householder QR in float64. Of large ones no float64 copy is made: Cholesky-QR, three times, with
    the inner products in float64, the first time with a shift that keeps the factor positive definite.
    """
    if matrix.numel() * 8 <= slice_bytes:
        basis, triangle = torch.linalg.qr(matrix.double())
        signs = triangle.diagonal().sign()
        return (basis * torch.where(signs == 0, 1, signs)).to(matrix.dtype)
    rows = max(1, slice_bytes // (8 * matrix.shape[1]))
    result = matrix.clone()
    for attempt in range(3):
        gram = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64, device=matrix.device)
        for part in result.split(rows):
            gram.addmm_(part.double().mT, part.double())
        if attempt == 0:
            gram.diagonal().add_(gram.diagonal().sum() * 1e-13)
        triangle = torch.linalg.cholesky(gram, upper=True)
        for part in result.split(rows):
            part.copy_(torch.linalg.solve_triangular(triangle, part.double(), upper=True, left=False))
    return result


def _left_singular(rows: Sequence[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """The leading left singular vectors (columns, float64) and squared singular values, by the inner products."""
    count = sum(len(part) for part in rows)
    gram = torch.zeros(count, count, dtype=torch.float64, device=rows[0].device)
    for _, part in _slices(rows):
        gram.addmm_(part, part.mT)
    values, vectors = torch.linalg.eigh(gram)
    return vectors.flip(-1)[:, :rank], values.flip(-1)[:rank].clamp_min(0)


def _filled(values: Tensor, vectors: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Drop directions that are rounding noise, normalise, and fill up with random ones to the rank."""
    top = values[0] if len(values) else 0
    kept = int((values > _NOISE**2 * top).sum())
    filled = torch.zeros(rank, dtype=torch.float64, device=values.device)
    filled[:kept] = values[:kept]
    shape = vectors.shape[0], rank - kept
    fill = torch.randn(shape, generator=generator, dtype=vectors.dtype).to(vectors.device)
    found = vectors[:, :kept] / torch.linalg.vector_norm(vectors[:, :kept], dim=0).clamp_min(1e-300)
    fill = fill / torch.linalg.vector_norm(fill, dim=0)
    return filled, fix_signs(orthonormal_columns(torch.cat([found, fill], dim=1)))


def _slices(rows: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """All rows in float64, some columns at a time."""
    count, dimension = sum(len(part) for part in rows), rows[0].shape[1]
    step = max(1, _SLICE_BYTES // (8 * count))
    for start in range(0, dimension, step):
        columns = slice(start, start + step)
        yield columns, torch.cat([part[:, columns].double() for part in rows])


def _product(rows: Sequence[Tensor], matrix: Tensor) -> Tensor:
    return torch.cat([part @ matrix for part in rows])


def _adjoint(rows: Sequence[Tensor], matrix: Tensor) -> Tensor:
    """``Gᵀ matrix`` for the stacked rows G, in the rows' dtype."""
    ends = list(itertools.accumulate(len(part) for part in rows))
    result = torch.zeros(rows[0].shape[1], matrix.shape[1], dtype=rows[0].dtype, device=rows[0].device)
    for part, end in zip(rows, ends, strict=True):
        result.addmm_(part.mT, matrix[end - len(part) : end].to(part.dtype))
    return result
