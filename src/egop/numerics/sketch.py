"""Leading directions of many gradients without a d x d matrix: randomized SVD and a streaming sketch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from egop.numerics.eigen import fix_signs
from egop.numerics.orthonormal import householder_qr

# float64 copies are made in slices of at most this size.
_SLICE_BYTES = 64 * 2**20
# Directions weaker than this, relative to the strongest, are rounding errors of float32 gradients.
_NOISE = 1e-6
# Up to this many rows per direction, inner products are exact and cost less than power iterations.
_EXACT = 4


class RowSketch:
    """A bounded summary of any number of rows that keeps their leading directions.

    Rows are kept as they are while they fit. When there are more, a truncated SVD compresses them to seven eighths of
    the capacity, keeping what contributes most to the sum of outer products. Sketches of parts merge into a sketch of
    the whole.

    Args:
        rank: number of leading directions wanted.
        capacity: number of rows to keep; raised to four times the rank, below which directions near the cut blur.
    """

    def __init__(self, rank: int, capacity: int) -> None:
        self.rank = rank
        self.capacity = max(_EXACT * rank, capacity)
        self.kept = 7 * self.capacity // 8
        self.rows: list[Tensor] = []
        self.count = 0

    def add(self, rows: Tensor) -> None:
        """Add rows."""
        for piece in rows.split(self.capacity - self.kept):
            self.rows.append(piece)
            self.count += len(piece)
            if sum(map(len, self.rows)) > self.capacity:
                self._compress()

    def merge(self, other: RowSketch) -> None:
        """Add everything that another sketch has seen."""
        seen = self.count + other.count
        for rows in other.rows:
            self.add(rows)
        self.count = seen

    def leading(self, power_iterations: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the leading eigenvalues and eigenvectors (orthonormal columns) of the mean outer product."""
        squares, vectors = leading_directions(self.rows, self.rank, power_iterations, generator)
        return squares / self.count, vectors

    def _compress(self) -> None:
        vectors, _ = _left_singular_vectors(self.rows, self.kept)
        compressed = torch.empty(
            vectors.shape[1], self.rows[0].shape[1], dtype=self.rows[0].dtype, device=vectors.device
        )
        for columns, part in _slice_columns(self.rows):
            compressed[:, columns] = (vectors.mT @ part).to(compressed.dtype)
        self.rows = [compressed]


def leading_directions(
    rows: Sequence[Tensor], rank: int, power_iterations: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the ``rank`` largest squared singular values of the rows and their right singular vectors (columns).

    A few rows, or those of a full sketch, are decomposed exactly through their inner products. Many rows go through a
    randomized range finder of twice the rank with power iterations; less oversampling would miss directions near the
    cut. Missing directions are filled with random orthonormal ones.
    """
    count, dimension = sum(len(part) for part in rows), rows[0].shape[1]
    if not all(torch.isfinite(part).all() for part in rows):
        raise torch.linalg.LinAlgError("The gradients to decompose have entries that are not finite.")
    width = min(2 * rank, dimension)
    if count <= _EXACT * rank:
        left, values = _left_singular_vectors(rows, rank)
        vectors = _multiply_transposed(rows, left, rank)
    else:
        start = torch.randn(count, width, generator=generator, dtype=rows[0].dtype, device=generator.device)
        start = start.to(rows[0].device)
        basis = orthonormalize_columns(_multiply_transposed(rows, start, width))
        for _ in range(power_iterations):
            image, _ = torch.linalg.qr(_multiply(rows, basis).double())
            basis = orthonormalize_columns(_multiply_transposed(rows, image.to(basis.dtype), width))
        _, singular, right = torch.linalg.svd(_multiply(rows, basis).double(), full_matrices=False)
        values = singular[:rank].square()
        vectors = basis @ right[:rank].mT.to(basis.dtype)
    return _fill_missing(values, vectors, generator)


def orthonormalize_columns(matrix: Tensor) -> Tensor:
    """Orthonormalize the columns in order, in their own dtype; each keeps its direction as far as possible.

    A small matrix goes through Householder QR in float64. A large one is overwritten, because a float64 copy would not
    fit: it goes through Cholesky-QR with inner products in float64, first with a shift that keeps the factor positive
    definite, then until it is exact, at most three times.
    """
    if matrix.numel() * 8 <= _SLICE_BYTES:
        return householder_qr(matrix.double()).to(matrix.dtype)
    rows = max(1, _SLICE_BYTES // (8 * matrix.shape[1]))
    eye = torch.eye(matrix.shape[1], dtype=torch.float64, device=matrix.device)
    for attempt in range(3):
        gram = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64, device=matrix.device)
        for part in matrix.split(rows):
            gram.addmm_(part.double().mT, part.double())
        if attempt > 0 and (gram - eye).abs().max() < 4 * torch.finfo(matrix.dtype).eps:
            break
        if attempt == 0:
            gram.diagonal().add_(gram.diagonal().sum() * 1e-13)
        triangle = torch.linalg.cholesky(gram, upper=True)
        for part in matrix.split(rows):
            part.copy_(torch.linalg.solve_triangular(triangle, part.double(), upper=True, left=False))
    return matrix


def _left_singular_vectors(rows: Sequence[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Return the leading left singular vectors (columns) and squared singular values, in float64."""
    count = sum(len(part) for part in rows)
    gram = torch.zeros(count, count, dtype=torch.float64, device=rows[0].device)
    for _, part in _slice_columns(rows):
        gram.addmm_(part, part.mT)
    values, vectors = torch.linalg.eigh(gram)
    return vectors.flip(-1)[:, :rank], values.flip(-1)[:rank].clamp_min(0)


def _fill_missing(values: Tensor, vectors: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Replace missing directions and rounding noise by random ones; orthonormalize, large matrices in place."""
    dimension, rank = vectors.shape
    kept = int((values > _NOISE**2 * values[0]).sum())
    filled = torch.zeros(rank, dtype=torch.float64, device=values.device)
    filled[:kept] = values[:kept]
    vectors[:, kept:] = torch.randn(
        dimension, rank - kept, generator=generator, dtype=vectors.dtype, device=generator.device
    ).to(vectors.device)
    vectors /= torch.linalg.vector_norm(vectors, dim=0)
    vectors = orthonormalize_columns(vectors)
    for part in vectors.split(max(1, _SLICE_BYTES // (8 * dimension)), dim=1):
        part.copy_(fix_signs(part))
    return filled, vectors


def _slice_columns(rows: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Yield all rows in float64, a slice of columns at a time."""
    count, dimension = sum(len(part) for part in rows), rows[0].shape[1]
    step = max(1, _SLICE_BYTES // (8 * count))
    for start in range(0, dimension, step):
        columns = slice(start, start + step)
        yield columns, torch.cat([part[:, columns].double() for part in rows])


def _multiply(rows: Sequence[Tensor], matrix: Tensor) -> Tensor:
    return torch.cat([part @ matrix for part in rows])


def _multiply_transposed(rows: Sequence[Tensor], matrix: Tensor, width: int) -> Tensor:
    """Return ``Gᵀ matrix`` for the stacked rows G, in their dtype, padded with zero columns to a width."""
    ends = list(itertools.accumulate(len(part) for part in rows))
    result = torch.zeros(rows[0].shape[1], width, dtype=rows[0].dtype, device=rows[0].device)
    for part, end in zip(rows, ends, strict=True):
        result[:, : matrix.shape[1]].addmm_(part.mT, matrix[end - len(part) : end].to(part.dtype))
    return result
