"""Eigenvectors in float64, with signs and null spaces that do not depend on rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from egop.numerics.orthonormal import orthonormalize

# Errors up to this many units in the last place count as rounding.
ROUNDING = 4
# A null space with more dimensions than this is not decomposed.
_WIDE_NULL_SPACE = 2048


def eigenbasis(matrix: Tensor, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues and eigenvectors (columns) of a positive semidefinite matrix, largest first.

    The matrix is decomposed in float64. Eigenvalues are never negative. Signs and null-space directions are chosen by
    a rule, not by rounding.

    Args:
        matrix: the matrix.
        noise: relative size up to which an eigenvalue counts as rounding error. The precision of the matrix sets a
            lower limit.
    """
    noise = max(noise, ROUNDING * torch.finfo(matrix.dtype).eps)
    matrix = _check_finite(matrix.double())
    values, vectors = _eigh((matrix + matrix.mT) / 2)
    values = values.clamp_min(0)
    return values, _check_orthonormal(fix_signs(_fix_null_space(values, vectors, noise)))


def eigenbasis_from_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenbasis of the mean outer product of the rows, computed from the rows themselves.

    A QR decomposition reduces the rows to a small triangle for the SVD. With few rows this costs no more than an
    eigendecomposition of their inner products, and it does not square the singular values, so small ones survive.

    The basis is complete: directions that no row has come last, with eigenvalue zero.
    """
    noise = row_noise(rows.dtype)
    rows = _check_finite(rows.double())
    count, dimension = rows.shape
    try:
        if count < dimension:
            vectors, triangle = torch.linalg.qr(rows.mT, mode="complete")
            rotated, singular, _ = torch.linalg.svd(triangle[:count])
            vectors[:, :count] = vectors[:, :count] @ rotated
        else:
            _, singular, vectors = torch.linalg.svd(torch.linalg.qr(rows, mode="r").R)
            vectors = vectors.mT
    except torch.linalg.LinAlgError:
        return eigenbasis(rows.mT @ rows / count, noise)
    values = rows.new_zeros(dimension)
    values[: len(singular)] = singular.square() / count
    return values, _check_orthonormal(fix_signs(_fix_null_space(values, vectors, noise)))


def leading_eigenbasis(matrix: Tensor, rank: int) -> Tensor:
    """Return an orthonormal basis that begins with the leading eigenvectors of a positive semidefinite matrix.

    A randomized range finder with two power iterations needs only products with ``rank`` columns, not a decomposition
    of the matrix. The remaining directions are in no particular order.
    """
    noise = ROUNDING * torch.finfo(matrix.dtype).eps
    matrix = _check_finite(matrix.double())
    vectors = _fixed_normal(len(matrix), rank, matrix.device)
    for _ in range(3):
        vectors = orthonormalize(matrix @ vectors)
    values, rotated = torch.linalg.eigh(vectors.mT @ matrix @ vectors)
    leading = vectors @ rotated.flip(-1)[:, : _rank(values.flip(-1), noise)]
    return _check_orthonormal(fix_signs(torch.cat([leading, _complement(leading)], dim=1)))


def fix_signs(vectors: Tensor) -> Tensor:
    """Flip columns so that the largest entry of each is positive.

    Among entries that are equally large up to rounding the first one counts, so rounding cannot flip a column.
    """
    sizes = vectors.abs()
    leading = (sizes >= sizes.amax(-2, keepdim=True) * (1 - 1e-6)).to(torch.uint8).argmax(-2, keepdim=True)
    signs = vectors.gather(-2, leading).sign()
    return vectors * torch.where(signs == 0, 1, signs)


def row_noise(dtype: torch.dtype) -> float:
    """Return the largest relative eigenvalue of an outer product that rounding of the rows alone can cause."""
    return (ROUNDING * torch.finfo(dtype).eps) ** 2


def noise_floor(dtype: torch.dtype) -> float:
    """Return the relative size below which an entry of a gradient in an eigenbasis is rounding error.

    Null-space directions are known only up to the rounding of the Gram matrix divided by its smallest eigenvalue, so
    gradients leak slightly from weak directions into them.
    """
    return min(math.sqrt(torch.finfo(dtype).eps), 1e-6)


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose a positive semidefinite matrix, largest eigenvalue first.

    If the solver does not converge, use an SVD, which has the same eigenvectors.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        vectors, values, _ = torch.linalg.svd(matrix)
        return values, vectors
    return values.flip(-1), vectors.flip(-1)


def _rank(values: Tensor, noise: float) -> int:
    return int((values > noise * values[0]).sum())


def _fix_null_space(values: Tensor, vectors: Tensor, noise: float) -> Tensor:
    """Replace the eigenvectors whose eigenvalues are zero up to rounding by ones that rounding cannot change.

    They diagonalize a fixed diagonal matrix within their span, so inputs that are always zero and dead units keep their
    own axes. The diagonal holds powers of e: their means never coincide, so there are no new ties. A wide null space is
    completed by :func:`_complement` instead, which needs no decomposition.
    """
    rank = _rank(values, noise)
    null = vectors[:, rank:]
    if null.shape[1] < 2:
        return vectors
    if null.shape[1] > _WIDE_NULL_SPACE:
        return torch.cat([vectors[:, :rank], _complement(vectors[:, :rank])], dim=1)
    size = len(vectors)
    diagonal = torch.arange(size, dtype=null.dtype, device=null.device).div(-size).exp()
    rotation = _eigh(null.mT @ (diagonal[:, None] * null))[1]
    return torch.cat([vectors[:, :rank], null @ rotation], dim=1)


def _complement(vectors: Tensor) -> Tensor:
    """Complete orthonormal columns U to a basis in a way that rounding does not change.

    E is a fixed frame and W the orthogonal factor of EᵀU. The reflection along U + EW takes -EW to U, and so the
    directions outside E to directions outside U. Householder's own completion would depend on the signs of entries that
    are zero up to rounding.
    """
    size, rank = vectors.shape
    frame = torch.linalg.qr(_fixed_normal(size, rank, vectors.device), mode="complete").Q
    inside, outside = frame[:, :rank], frame[:, rank:]
    left, _, right = torch.linalg.svd(inside.mT @ vectors)
    along = vectors + inside @ (left @ right)
    completion: Tensor = outside - along @ torch.linalg.solve(along.mT @ along / 2, along.mT @ outside)
    return completion


def _fixed_normal(rows: int, columns: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu").to(device)


def _check_finite(matrix: Tensor) -> Tensor:
    if not torch.isfinite(matrix).all():
        raise torch.linalg.LinAlgError("The matrix to decompose has entries that are not finite.")
    return matrix


def _check_orthonormal(vectors: Tensor) -> Tensor:
    # Multiply a few random sign vectors by VᵀV: all inner products would cost more than many decompositions. An entry
    # of VᵀV − I that is too large shows in its row of (VᵀV − I) x, unless the signs in x happen to cancel it.
    signs = torch.randint(2, (vectors.shape[1], 8), generator=torch.Generator().manual_seed(0), device="cpu")
    probes = (2 * signs - 1).to(vectors)
    error = float((vectors.mT @ (vectors @ probes) - probes).abs().max())
    if not error < 1e-8:
        raise torch.linalg.LinAlgError(
            f"The decomposition returned vectors that are not orthonormal (error {error:.1e}). "
            "Likely causes are gradients of extreme scale or a faulty LAPACK build."
        )
    return vectors.contiguous()
