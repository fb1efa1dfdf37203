"""How far a matrix is from a Kronecker product: what methods with one factor per side cannot express."""

from __future__ import annotations

import torch
from torch import Tensor

from egop.numerics import fix_signs

Shape = int | tuple[int, int]


def nearest_kronecker(matrix: Tensor, left: Shape, right: Shape) -> tuple[Tensor, Tensor]:
    r"""The pair (A, B) that minimises :math:`\|H - A \otimes B\|_F`.

    Rearranged so that each block of H becomes a row, a Kronecker product is an outer product
    :math:`\mathrm{vec}(A) \mathrm{vec}(B)^\top`, and the nearest one is the leading term of an SVD.

    Args:
        matrix: H, of shape (rows of A x rows of B, columns of A x columns of B).
        left: the shape of A; one number for a square.
        right: the shape of B.

    Returns:
        A and B in float64, of equal norm; the largest entry of B is positive.

    Example:
        >>> A, B = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0], [1.0]])
        >>> one, other = egop.theory.nearest_kronecker(torch.kron(A, B), (1, 2), (2, 1))
        >>> torch.allclose(torch.kron(one, other), torch.kron(A, B).double())
        True

    Reference: Van Loan and Pitsianis, *Approximation with Kronecker Products* (1993); the paper's Appendix D compares
    with methods that are limited to such products.
    """
    rearranged, first, second = _rearranged(matrix, left, right)
    U, singular, Vh = torch.linalg.svd(rearranged, full_matrices=False)
    row = fix_signs(Vh[:1].mT).squeeze(-1)
    column = U[:, 0] * torch.dot(row, Vh[0]).sign()
    root = singular[0].sqrt()
    return (root * column).reshape(first), (root * row).reshape(second)


def kronecker_residual(matrix: Tensor, left: Shape, right: Shape) -> float:
    r"""The relative distance :math:`\min_{A, B} \|H - A \otimes B\|_F / \|H\|_F` to the Kronecker products.

    0 for a Kronecker product (and for the zero matrix), below 1 for every other matrix.

    Args:
        matrix: H, of shape (rows of A x rows of B, columns of A x columns of B). A Hessian over the entries of an
            m x n weight, in torch's order, has ``left=m`` and ``right=n``.
        left: the shape of A; one number for a square.
        right: the shape of B.

    Example:
        >>> round(egop.theory.kronecker_residual(torch.diag(torch.tensor([1.0, 0.0, 0.0, 1.0])), 2, 2), 6)
        0.707107

    Reference: as for :func:`nearest_kronecker`; the paper's experiment on regression with errors in variables.
    """
    rearranged, _, _ = _rearranged(matrix, left, right)
    singular = torch.linalg.svdvals(rearranged)
    # From the singular values that are left out: 1 − σ₁²/‖H‖² would lose half of the digits near zero.
    return float(singular[1:].norm() / singular.norm()) if singular[0] > 0 else 0.0


def kronecker_rotation(left: Tensor, right: Tensor) -> Tensor:
    r"""The rotation of vectors that rotating matrices from both sides amounts to, in torch's order of entries.

    .. math:: V = Q_L^\top \otimes Q_R^\top, \qquad \mathrm{mat}(V g) = Q_L^\top \, \mathrm{mat}(g) \, Q_R

    So whatever SOAP's pair of rotations does, one rotation of the whole vector can do; for the converse see
    :func:`rotation_beyond_kronecker`.

    Args:
        left: :math:`Q_L`, orthogonal.
        right: :math:`Q_R`, orthogonal.

    Example:
        >>> swap, keep = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.eye(2)
        >>> (egop.theory.kronecker_rotation(swap, keep) @ torch.arange(4).double()).tolist()
        [2.0, 3.0, 0.0, 1.0]

    Reference: the lemma of Appendix D, first part (it has no label; in the paper's order of entries, column by column,
    the factors are the other way round).
    """
    for name, factor in (("left", left), ("right", right)):
        size = factor.shape[-1]
        if factor.shape != (size, size) or not _orthogonal(factor):
            raise ValueError(f"Invalid {name} value: shape {tuple(factor.shape)}. Must be an orthogonal matrix.")
    return torch.kron(left.detach().double().mT.contiguous(), right.detach().double().mT.contiguous())


def rotation_beyond_kronecker(rows: int, columns: int) -> Tensor:
    r"""A rotation of all entries of a matrix that no rotations of its two sides give: the paper's example.

    Its first column has all entries alike, and its second one sign in the first half and the other in the second.
    Were it a product, the first would make the second repeat a pattern row after row, which it does not. The other
    columns complete the basis. How far it is from all products: :func:`kronecker_residual`.

    Args:
        rows: of the matrix; at least 2.
        columns: of the matrix; at least 2. The number of entries must be even.

    Example:
        >>> V = egop.theory.rotation_beyond_kronecker(2, 2)
        >>> torch.allclose(V.mT @ V, torch.eye(4).double()), egop.theory.kronecker_residual(V, 2, 2) > 0.3
        (True, True)

    Reference: the lemma of Appendix D, second part, and its proof.
    """
    if rows < 2 or columns < 2 or rows * columns % 2:
        raise ValueError(
            f"Invalid shape: {rows} x {columns}. Both sides must be at least 2, and the number of entries even."
        )
    size = rows * columns
    half = torch.ones(size // 2, dtype=torch.float64, device="cpu")
    start = torch.stack([torch.cat([half, half]), torch.cat([half, -half])], 1) / size**0.5
    V: Tensor = torch.linalg.qr(torch.cat([start, torch.eye(size, dtype=start.dtype, device=start.device)], 1)).Q
    V[:, :2] = start  # which is what they are, up to sign and rounding
    return V


def _rearranged(matrix: Tensor, left: Shape, right: Shape) -> tuple[Tensor, tuple[int, int], tuple[int, int]]:
    """One row per entry of A, one column per entry of B."""
    first, second = _shape(left, "left"), _shape(right, "right")
    wanted = (first[0] * second[0], first[1] * second[1])
    if tuple(matrix.shape) != wanted:
        raise ValueError(
            f"Invalid matrix value: shape {tuple(matrix.shape)}. Must be {wanted} for factors of shape {first} and "
            f"{second}."
        )
    blocks = matrix.detach().double().reshape(first[0], second[0], first[1], second[1])
    return blocks.permute(0, 2, 1, 3).reshape(first[0] * first[1], second[0] * second[1]), first, second


def _shape(shape: Shape, name: str) -> tuple[int, int]:
    rows, columns = (shape, shape) if isinstance(shape, int) else shape
    if rows < 1 or columns < 1:
        raise ValueError(f"Invalid {name} value: {shape}. Must be a positive number or a pair of them.")
    return rows, columns


def _orthogonal(matrix: Tensor) -> bool:
    double = matrix.detach().double()
    return bool(
        (double.mT @ double - torch.eye(len(double), dtype=double.dtype, device=double.device)).abs().max() < 1e-6
    )
