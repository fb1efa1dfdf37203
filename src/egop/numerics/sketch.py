"""Leading directions of many gradients without anything of size d x d: randomized SVD and a streaming sketch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from egop.distributed import Holding, rows_at
from egop.numerics.linalg import fix_signs

# Intermediate float64 copies are made in slices of at most this size.
_SLICE_BYTES = 64 * 2**20
# Directions weaker than this, relative to the strongest, are rounding noise of float32 gradients.
_NOISE = 1e-6
# Up to this many rows for each direction wanted, inner products cost less than power iterations, and are exact.
_EXACT = 4


class RowSketch:
    """A bounded summary of any number of rows that keeps their leading directions.

    Rows are kept as they are while they fit. When there are more, they are replaced by the seven eighths of them that
    say most about the sum of outer products (a truncated SVD), so whatever follows is seen together with what mattered
    before. Sketches of parts merge into a sketch of the whole.

    Args:
        rank: how many leading directions are wanted.
        capacity: how many rows may be held; at least four times the rank, below that the directions near the cut blur.
    """

    def __init__(self, rank: int, capacity: int) -> None:
        self.rank = rank
        self.capacity = max(_EXACT * rank, capacity)
        self.kept = 7 * self.capacity // 8
        self.rows: list[Tensor] = []
        self.count = 0

    @property
    def held(self) -> int:
        """How many rows it holds."""
        return sum(len(rows) for rows in self.rows)

    def add(self, rows: Tensor) -> None:
        """Take in rows."""
        for piece in rows.split(self.capacity - self.kept):
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

    def holding(self) -> Holding:
        """What this process has of the rows of all processes."""
        return Holding.of(self.count, self.rows)

    def prepare(self, holdings: Sequence[Holding], device: torch.device) -> None:
        """Nothing can fail before :meth:`collect`."""

    def collect(self, owner: int, holdings: Sequence[Holding], device: torch.device) -> None:
        """Merge the sketches of all processes in the owner's, the first one's first: so the rows are in order."""
        merged = RowSketch(self.rank, self.capacity)
        rows_at(owner, self.rows, holdings, device, merged.add)
        self.rows = merged.rows
        self.count = sum(holding.seen for holding in holdings)

    def leading(self, power_iterations: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The leading eigenvalues and orthonormal eigenvectors (columns) of the mean outer product of the rows seen."""
        squares, vectors = leading_directions(self.rows, self.rank, power_iterations, generator)
        return squares / self.count, vectors

    def _compress(self) -> None:
        vectors, _ = _left_singular(self.rows, self.kept)
        compressed = torch.empty(
            vectors.shape[1], self.rows[0].shape[1], dtype=self.rows[0].dtype, device=vectors.device
        )
        for columns, part in _slices(self.rows):
            compressed[:, columns] = (vectors.mT @ part).to(compressed.dtype)
        self.rows = [compressed]


def leading_directions(
    rows: Sequence[Tensor], rank: int, power_iterations: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The ``rank`` largest squared singular values of the rows and their right singular vectors, as columns.

    Few rows (and those of a full sketch) are decomposed exactly through their inner products. Many go through a
    randomized range finder with twice the rank and power iterations: with little oversampling the directions near the
    cut are found badly. Directions that no row has are filled up with random orthonormal ones.
    """
    count, dimension = sum(len(part) for part in rows), rows[0].shape[1]
    if not all(torch.isfinite(part).all() for part in rows):
        raise torch.linalg.LinAlgError("The gradients to decompose have entries that are not finite.")
    width = min(2 * rank, dimension)
    if count <= _EXACT * rank:
        left, values = _left_singular(rows, rank)
        vectors = _adjoint(rows, left, rank)
    else:
        start = torch.randn(count, width, generator=generator, dtype=rows[0].dtype, device=generator.device)
        start = start.to(rows[0].device)
        basis = orthonormal_columns(_adjoint(rows, start, width), overwrite=True)
        for _ in range(power_iterations):
            image, _ = torch.linalg.qr(_product(rows, basis).double())
            basis = orthonormal_columns(_adjoint(rows, image.to(basis.dtype), width), overwrite=True)
        _, singular, right = torch.linalg.svd(_product(rows, basis).double(), full_matrices=False)
        values = singular[:rank].square()
        vectors = basis @ right[:rank].mT.to(basis.dtype)
    return _filled(values, vectors, generator)


def orthonormal_columns(matrix: Tensor, slice_bytes: int = _SLICE_BYTES, overwrite: bool = False) -> Tensor:
    """An orthonormal basis of the columns, in their order and dtype; each column keeps its direction as far as it can.

    Small matrices by Householder QR in float64. Of large ones no float64 copy is made: Cholesky-QR with the inner
    products in float64, the first time with a shift that keeps the factor positive definite, then until it is exact,
    at most three times.

    Args:
        matrix: the columns.
        slice_bytes: what a matrix may take to be a small one, and intermediate copies of a large one.
        overwrite: whether the result of a large one may take the place of the matrix.
    """
    if matrix.numel() * 8 <= slice_bytes:
        basis, triangle = torch.linalg.qr(matrix.double())
        signs = triangle.diagonal().sign()
        signed: Tensor = basis * torch.where(signs == 0, 1, signs)
        return signed.to(matrix.dtype)
    rows = max(1, slice_bytes // (8 * matrix.shape[1]))
    result = matrix if overwrite else matrix.clone()
    eye = torch.eye(matrix.shape[1], dtype=torch.float64, device=matrix.device)
    for attempt in range(3):
        gram = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64, device=matrix.device)
        for part in result.split(rows):
            gram.addmm_(part.double().mT, part.double())
        if attempt > 0 and (gram - eye).abs().max() < 4 * torch.finfo(matrix.dtype).eps:
            break
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


def _filled(values: Tensor, vectors: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Replace directions that are rounding noise, or lacking, by random ones; orthonormalise, in place if large."""
    dimension, rank = vectors.shape
    kept = int((values > _NOISE**2 * values[0]).sum())
    filled = torch.zeros(rank, dtype=torch.float64, device=values.device)
    filled[:kept] = values[:kept]
    vectors[:, kept:] = torch.randn(
        dimension, rank - kept, generator=generator, dtype=vectors.dtype, device=generator.device
    ).to(vectors.device)
    vectors /= torch.linalg.vector_norm(vectors, dim=0)
    vectors = orthonormal_columns(vectors, overwrite=True)
    for part in vectors.split(max(1, _SLICE_BYTES // (8 * dimension)), dim=1):
        part.copy_(fix_signs(part))
    return filled, vectors


def _slices(rows: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """All rows in float64, some columns at a time."""
    count, dimension = sum(len(part) for part in rows), rows[0].shape[1]
    step = max(1, _SLICE_BYTES // (8 * count))
    for start in range(0, dimension, step):
        columns = slice(start, start + step)
        yield columns, torch.cat([part[:, columns].double() for part in rows])


def _product(rows: Sequence[Tensor], matrix: Tensor) -> Tensor:
    return torch.cat([part @ matrix for part in rows])


def _adjoint(rows: Sequence[Tensor], matrix: Tensor, width: int) -> Tensor:
    """``Gᵀ matrix`` for the stacked rows G, in the rows' dtype, with zero columns added up to a width."""
    ends = list(itertools.accumulate(len(part) for part in rows))
    result = torch.zeros(rows[0].shape[1], width, dtype=rows[0].dtype, device=rows[0].device)
    for part, end in zip(rows, ends, strict=True):
        result[:, : matrix.shape[1]].addmm_(part.mT, matrix[end - len(part) : end].to(part.dtype))
    return result
