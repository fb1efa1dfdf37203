"""The distance of a matrix from the Kronecker products, which methods with one factor per side are limited to."""

import torch
from torch import Tensor

Shape = int | tuple[int, int]


def nearest_kronecker(matrix: Tensor, left: Shape, right: Shape) -> tuple[Tensor, Tensor]:
    r"""Return the pair (A, B) that minimises :math:`\|H - A \otimes B\|_F`.

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
        >>> one, other = theory.nearest_kronecker(torch.kron(A, B), (1, 2), (2, 1))
        >>> torch.allclose(torch.kron(one, other), torch.kron(A, B).double())
        True

    Reference: Van Loan and Pitsianis, *Approximation with Kronecker Products* (1993); the paper's Appendix D compares
    with methods that are limited to such products.
    """
    rearranged, first, second = _rearrange(matrix, left, right)
    U, singular, Vh = torch.linalg.svd(rearranged, full_matrices=False)
    sign = -1.0 if Vh[0, Vh[0].abs().argmax()] < 0 else 1.0
    root = sign * singular[0].sqrt()
    return (root * U[:, 0]).reshape(first), (root * Vh[0]).reshape(second)


def kronecker_residual(matrix: Tensor, left: Shape, right: Shape) -> float:
    r"""Return the relative distance :math:`\min_{A, B} \|H - A \otimes B\|_F / \|H\|_F` to the Kronecker products.

    It is 0 for a Kronecker product (and for the zero matrix), and below 1 for every other matrix.

    Args:
        matrix: H, of shape (rows of A x rows of B, columns of A x columns of B). A Hessian over the entries of an
            m x n weight, in torch's order, has ``left=m`` and ``right=n``.
        left: the shape of A; one number for a square.
        right: the shape of B.

    Example:
        >>> round(theory.kronecker_residual(torch.diag(torch.tensor([1.0, 0.0, 0.0, 1.0])), 2, 2), 6)
        0.707107

    Reference: as for :func:`nearest_kronecker`; the paper's experiment on regression with errors in variables.
    """
    rearranged, _, _ = _rearrange(matrix, left, right)
    singular = torch.linalg.svdvals(rearranged)
    # 1 − σ₁²/‖H‖² would lose half of the digits near zero.
    return float(singular[1:].norm() / singular.norm()) if singular[0] > 0 else 0.0


def kronecker_rotation(left: Tensor, right: Tensor) -> Tensor:
    r"""Return the rotation of a flattened matrix that equals rotating the matrix from both sides.

    .. math:: V = Q_L^\top \otimes Q_R^\top, \qquad \mathrm{mat}(V g) = Q_L^\top \, \mathrm{mat}(g) \, Q_R

    The matrix is flattened in torch's order. So one rotation of the whole vector can do what SOAP's pair of rotations
    does; for the converse see :func:`rotation_beyond_kronecker`.

    Args:
        left: :math:`Q_L`, orthogonal.
        right: :math:`Q_R`, orthogonal.

    Example:
        >>> swap, keep = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.eye(2)
        >>> (theory.kronecker_rotation(swap, keep) @ torch.arange(4).double()).tolist()
        [2.0, 3.0, 0.0, 1.0]

    Reference: the lemma of Appendix D, first part (it has no label; in the paper's order of entries, column by column,
    the factors are the other way round).
    """
    return torch.kron(left.detach().double().mT.contiguous(), right.detach().double().mT.contiguous())


def rotation_beyond_kronecker(rows: int, columns: int) -> Tensor:
    r"""Return a rotation of all entries that no pair of side rotations can express: the paper's example.

    All entries of its first column are equal; those of its second column change sign halfway. If it were a Kronecker
    product, the first column would force the second to repeat one pattern in every row, which it does not. The other
    columns complete the basis. :func:`kronecker_residual` gives its distance from the products.

    Args:
        rows: rows of the matrix; at least 2.
        columns: columns of the matrix; at least 2. The number of entries must be even.

    Example:
        >>> V = theory.rotation_beyond_kronecker(2, 2)
        >>> torch.allclose(V.mT @ V, torch.eye(4).double()), theory.kronecker_residual(V, 2, 2) > 0.3
        (True, True)

    Reference: the lemma of Appendix D, second part, and its proof.
    """
    size = rows * columns
    half = torch.ones(size // 2, dtype=torch.float64, device="cpu")
    start = torch.stack([torch.cat([half, half]), torch.cat([half, -half])], 1) / size**0.5
    V: Tensor = torch.linalg.qr(torch.cat([start, torch.eye(size, dtype=start.dtype, device=start.device)], 1)).Q
    V[:, :2] = start  # QR returns them up to sign and rounding
    return V


def _rearrange(matrix: Tensor, left: Shape, right: Shape) -> tuple[Tensor, tuple[int, int], tuple[int, int]]:
    """Rearrange to one row per entry of A and one column per entry of B; return the factors' shapes too."""
    first, second = ((shape, shape) if isinstance(shape, int) else shape for shape in (left, right))
    blocks = matrix.detach().double().reshape(first[0], second[0], first[1], second[1])
    return blocks.permute(0, 2, 1, 3).reshape(first[0] * first[1], second[0] * second[1]), first, second
