"""Orthonormal columns: draw random ones, orthonormalize given ones, and measure the error."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Widths above which the method that is faster for narrow matrices becomes slower, measured on an H200.
_WIDE = 1024  # for a batched Cholesky decomposition
_VERY_WIDE = 3072  # for the inverse of a triangle


def random_orthonormal(rows: int, columns: int, generator: torch.Generator, stack: Sequence[int] = ()) -> Tensor:
    """Draw a matrix (or a stack of matrices) with orthonormal columns, uniform by Haar measure, in float64."""
    normal = torch.randn(*stack, rows, columns, generator=generator, dtype=torch.float64, device=generator.device)
    vectors, triangle = torch.linalg.qr(normal)
    signed: Tensor = vectors * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return signed


def identity_matrices(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return identity matrices of this shape, whose leading dimensions are those of the stack."""
    return torch.eye(*shape[-2:], dtype=dtype, device=device).expand(*shape).clone()


def orthonormality_error(vectors: Tensor) -> float:
    """Return the largest entry of ``|VᵀV − I|``."""
    gram = vectors.mT @ vectors
    return float((gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).abs().max())


def orthonormalize(matrices: Tensor) -> Tensor:
    """Orthonormalize the columns from first to last: return the Q of the QR decomposition with a positive diagonal.

    Householder QR is slow on a GPU. Where float64 is fast, use Cholesky-QR instead, which consists of matrix products:
    divide the columns by the Cholesky factor R of their inner products, twice. A shift makes the first division
    possible for nearly dependent columns; the second one removes the error that the shift leaves.
    """
    return cholesky_qr(matrices) if _has_fast_float64(matrices.device) else householder_qr(matrices)


def householder_qr(matrices: Tensor) -> Tensor:
    """Orthonormalize the columns by Householder reflections."""
    vectors, triangle = torch.linalg.qr(matrices)
    signs = triangle.diagonal(dim1=-2, dim2=-1).sign()
    signed: Tensor = vectors * torch.where(signs == 0, 1, signs).unsqueeze(-2)
    return signed


def cholesky_qr(matrices: Tensor) -> Tensor:
    """Orthonormalize the columns by Cholesky decompositions in float64."""
    columns = matrices.double()
    columns = columns / torch.linalg.vector_norm(columns, dim=-2, keepdim=True).clamp_min(1e-300)
    shift = 10 * columns.shape[-2] * torch.finfo(torch.float64).eps  # above the rounding of an inner product
    for extra in (shift, 0.0):
        inner = columns.mT @ columns
        inner.diagonal(dim1=-2, dim2=-1).add_(extra)
        columns = _divide(columns, _cholesky(inner))
    return columns.to(matrices.dtype)


def scale_near_one(matrices: Tensor) -> Tensor:
    """Divide each matrix by a power of two, which is exact, so that squares of entries neither overflow nor vanish."""
    largest = torch.linalg.vector_norm(matrices, torch.inf, (-2, -1), keepdim=True)
    scale = (torch.frexp(largest).mantissa / largest).clamp_max(2.0**126)
    return matrices * torch.where(largest > 0, scale, 1)


def _cholesky(matrices: Tensor) -> Tensor:
    """Return Cholesky factors; they are not finite where none exists, because a check would wait for the device.

    Wide matrices are decomposed one at a time, which takes half as long as the batched solver for small matrices.
    """
    if matrices.dim() > 2 and matrices.shape[-1] > _WIDE:
        return torch.stack([_cholesky(matrix) for matrix in matrices])
    lower: Tensor = torch.linalg.cholesky_ex(matrices)[0]
    return lower


def _divide(columns: Tensor, lower: Tensor) -> Tensor:
    """Divide the columns by the transpose of a triangle. Its inverse is faster unless the triangle is very wide."""
    if lower.shape[-1] > _VERY_WIDE:
        divided: Tensor = torch.linalg.solve_triangular(lower.mT, columns, upper=True, left=False)
        return divided
    return columns @ invert_lower_triangular(lower).mT


def invert_lower_triangular(lower: Tensor) -> Tensor:
    """Invert lower triangular matrices mostly by products: small diagonal blocks first, then pairs of them.

    The inverse of [[A, 0], [B, C]] is [[A⁻¹, 0], [-C⁻¹ B A⁻¹, C⁻¹]].
    """
    size = lower.shape[-1]
    doublings = max(0, math.ceil(math.log2(size / 32)))
    small = -(-size // 2**doublings)
    padded = lower.new_zeros(*lower.shape[:-2], small * 2**doublings, small * 2**doublings)
    padded[..., :size, :size] = lower
    padded.diagonal(dim1=-2, dim2=-1)[..., size:] = 1
    inverse = torch.zeros_like(padded)
    first = _diagonal_blocks(padded, small)
    ones = torch.eye(small, dtype=lower.dtype, device=lower.device).expand_as(first)
    _diagonal_blocks(inverse, small).copy_(torch.linalg.solve_triangular(first, ones, upper=False))
    for half in (small * 2**level for level in range(doublings)):
        corner = _diagonal_blocks(padded, 2 * half)[..., half:, :half]
        pairs = _diagonal_blocks(inverse, 2 * half)
        pairs[..., half:, :half] = -pairs[..., half:, half:] @ (corner @ pairs[..., :half, :half])
    return inverse[..., :size, :size]


def _diagonal_blocks(matrices: Tensor, size: int) -> Tensor:
    count = matrices.shape[-1] // size
    squares: Tensor = matrices.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    return squares.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _has_fast_float64(device: torch.device) -> bool:
    """Return True for data-center GPUs (V100, A100, H100, B200).

    Their float64 rate is a tenth of the float32 rate or more; on other GPUs it is a 32nd.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((7, 0), (8, 0), (9, 0), (10, 0))
