"""Decompositions in float64 that survive bad input, with fixed signs."""

from __future__ import annotations

import torch
from torch import Tensor


def fix_signs(vectors: Tensor) -> Tensor:
    """Turn each column so that its largest entry is positive: a decomposition leaves the sign open, runs must repeat.

    Among entries that are equally large up to rounding the first one counts, so that rounding cannot flip a column.
    """
    sizes = vectors.abs()
    leading = (sizes >= sizes.amax(-2, keepdim=True) * (1 - 1e-6)).to(torch.uint8).argmax(-2, keepdim=True)
    signs = vectors.gather(-2, leading).sign()
    return vectors * torch.where(signs == 0, 1, signs)


def eigenbasis(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending and not negative, and eigenvectors (columns) of a positive semidefinite matrix.

    Always in float64. When the solver does not converge, the matrix is tried again with a shifted diagonal (which has
    the same eigenvectors), then by SVD (which has them too, the matrix being positive semidefinite).
    """
    matrix = _finite(matrix.double())
    matrix = (matrix + matrix.mT) / 2
    shift = matrix.diagonal().mean() * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    for attempt in (
        lambda: torch.linalg.eigh(matrix),
        lambda: torch.linalg.eigh(matrix + shift),
    ):
        try:
            vectors = attempt()[1].flip(-1)
            break
        except torch.linalg.LinAlgError:
            continue
    else:
        vectors = torch.linalg.svd(matrix)[0]
    values = (vectors * (matrix @ vectors)).sum(-2).clamp_min(0)  # Rayleigh quotients: the same whatever the attempt
    values, order = values.sort(descending=True, stable=True)
    return values, _orthonormal(fix_signs(vectors[:, order]))


def eigenbasis_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same for the mean of the rows' outer products, by SVD of the rows: better conditioned, cheaper for few rows.

    The basis is complete: directions that no row has come last, with eigenvalue zero.
    """
    rows = _finite(rows.double())
    try:  # only rows fewer than the dimension leave directions to complete
        _, singular, vectors = torch.linalg.svd(rows, full_matrices=rows.shape[0] < rows.shape[1])
    except torch.linalg.LinAlgError:
        return eigenbasis(rows.mT @ rows / len(rows))
    values = rows.new_zeros(rows.shape[1])
    values[: len(singular)] = singular.square() / len(rows)
    return values, _orthonormal(fix_signs(vectors.mT))


class OuterProducts:
    """The mean outer product of rows that come in chunks: kept as rows while they are few, then as the matrix.

    Args:
        dimension: the length of a row.
        route: ``"eigh"`` adds up the matrix and decomposes it; ``"svd"`` keeps all rows and decomposes those;
            ``"auto"`` takes the second while there are fewer rows than dimensions.
    """

    def __init__(self, dimension: int, route: str = "auto") -> None:
        self.dimension = dimension
        self.route = route
        self.rows: list[Tensor] = []
        self.total: Tensor | None = None
        self.count = 0

    def add(self, rows: Tensor) -> None:
        """Take in rows."""
        self.rows.append(rows)
        self.count += len(rows)
        enough = self.route == "auto" and self.count >= self.dimension
        if self.route == "eigh" or enough or self.total is not None:
            self._fold()

    def merge(self, other: OuterProducts) -> None:
        """Take in all that another one has seen."""
        count = self.count + other.count
        for rows in other.rows:
            self.add(rows)
        if other.total is not None:
            self._fold()
            self.total = other.total.clone() if self.total is None else self.total + other.total
        self.count = count

    def eigenbasis(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the mean outer product."""
        if self.total is None:
            return eigenbasis_of_rows(torch.cat(self.rows))
        return eigenbasis(self.total / self.count)

    def _fold(self) -> None:
        for rows in self.rows:
            double = rows.double()
            if self.total is None:
                self.total = double.new_zeros(self.dimension, self.dimension)
            self.total.addmm_(double.mT, double)
        self.rows.clear()


def random_orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Orthonormal columns in a random direction (uniform by Haar measure), in float64."""
    normal = torch.randn(rows, columns, generator=generator, dtype=torch.float64, device=generator.device)
    vectors, triangle = torch.linalg.qr(normal)
    return vectors * triangle.diagonal().sign()


def orthonormality_error(vectors: Tensor) -> float:
    """The largest entry of ``|VᵀV − I|``."""
    gram = vectors.mT @ vectors
    return float((gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).abs().max())


def _finite(matrix: Tensor) -> Tensor:
    if not torch.isfinite(matrix).all():
        raise torch.linalg.LinAlgError("The matrix to decompose has entries that are not finite.")
    return matrix


def _orthonormal(vectors: Tensor) -> Tensor:
    error = orthonormality_error(vectors)
    if not error < 1e-8:
        raise torch.linalg.LinAlgError(
            f"The decomposition gave vectors that are not orthonormal (error {error:.1e}). "
            "Gradients of extreme scale, or a faulty LAPACK build, are likely causes."
        )
    return vectors.contiguous()
