"""Coordinate-wise smoothness constants of given Hessians: exact for few dimensions, bracketed for many."""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from egop.theory.checks import not_negative, positive, symmetric


class SmoothnessSum(NamedTuple):
    """The smallest sum of smoothness constants, between two numbers.

    Attributes:
        lower: no constants have a smaller sum.
        upper: the sum of ``constants``.
        constants: constants that are valid.

    Example:
        >>> bounds = egop.theory.smoothness_sum_bounds(torch.diag(torch.tensor([2.0, 3.0])))
        >>> bounds.lower <= bounds.upper, bounds.constants.round(decimals=4).tolist()
        (True, [2.0, 3.0])
    """

    lower: float
    upper: float
    constants: Tensor


def smoothness_constants(hessian: Tensor) -> Tensor:
    r"""The coordinate-wise smoothness constants with the smallest sum, by a semidefinite programme.

    .. math:: \min_L \sum_i L_i \quad \text{with} \quad -\mathrm{diag}(L) \preceq \nabla^2 f \preceq \mathrm{diag}(L)

    Meant for at most about 50 dimensions (seconds); above, use :func:`smoothness_sum_bounds`.

    Args:
        hessian: a symmetric matrix, or a stack of them, for which one set of constants has to serve.

    Returns:
        The constants, float64. They satisfy the inequalities up to rounding; their sum is the smallest to about 1e-7.

    Example:
        >>> egop.theory.smoothness_constants(torch.diag(torch.tensor([2.0, -3.0]))).round(decimals=4).tolist()
        [2.0, 3.0]

    Reference: Section 1 (Notation) for the constants, Appendix A.1 for their form as an inequality of matrices.
    """
    cvxpy = _import_cvxpy()
    matrices, size = _both_signs(hessian)
    top = float(matrices.abs().max())
    if top == 0:
        return matrices.new_zeros(size)
    constants = cvxpy.Variable(size)
    programme = cvxpy.Problem(
        cvxpy.Minimize(cvxpy.sum(constants)),
        [cvxpy.diag(constants) - matrix.cpu().numpy() / top >> 0 for matrix in matrices],
    )
    programme.solve(solver=cvxpy.CLARABEL)
    if constants.value is None:
        raise RuntimeError(
            f"The semidefinite programme for {size} constants ended with status '{programme.status}'. "
            "Use egop.theory.smoothness_sum_bounds, which needs no solver."
        )
    return _made_valid(torch.from_numpy(constants.value).to(matrices) * top, matrices)


def smoothness_sum_bounds(hessian: Tensor, *, tolerance: float = 1e-6, iterations: int = 5000) -> SmoothnessSum:
    r"""Bounds on the smallest sum of smoothness constants from both sides, without a solver.

    The dual of the programme of :func:`smoothness_constants` gives every coordinate a unit vector :math:`u_i` and
    maximises :math:`\sum_{ij} M_{ij} \langle u_i, u_j \rangle` (summed over :math:`M = \pm\nabla^2 f`, each with its
    own part of the vectors). Vectors in few dimensions are enough, and a power iteration,
    :math:`u \leftarrow M u` normalised, increases it. Any such vectors give the lower bound; constants read off from
    them, scaled until they are valid, give the upper one. A step costs :math:`d^2 \sqrt{2d}`.

    Args:
        hessian: a symmetric matrix, or a stack of them, for which one set of constants has to serve.
        tolerance: stop when the bounds differ by this fraction.
        iterations: stop after so many at the latest; the bounds hold whenever it stops.

    Example:
        >>> bounds = egop.theory.smoothness_sum_bounds(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> round(bounds.lower, 4), round(bounds.upper, 4)
        (6.0, 6.0)

    Reference: as for :func:`smoothness_constants`; the iteration is Burer and Monteiro's low-rank form of the
    programme, stepped as in Journée, Nesterov, Richtárik and Sepulchre, *Generalized Power Method* (2010).
    """
    not_negative(tolerance=tolerance)
    positive(iterations=iterations)
    matrices, size = _both_signs(hessian)
    top = float(matrices.abs().max())
    if top == 0:
        return SmoothnessSum(0.0, 0.0, matrices.new_zeros(size))
    scaled = matrices / top
    shift = max(0.0, -float(torch.linalg.eigvalsh(scaled).min()))  # makes the form convex, so that every step ascends
    rank = min(size, math.isqrt(2 * size) + 2)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(len(scaled), size, rank, generator=generator, dtype=torch.float64, device="cpu").to(scaled)
    lower, upper, constants = 0.0, math.inf, scaled.new_zeros(size)
    for step in range(1, iterations + 1):
        vectors = scaled @ vectors + shift * vectors
        vectors = vectors / vectors.square().sum((0, 2), keepdim=True).sqrt().clamp_min(1e-300)
        if step % 50 and step < iterations:
            continue
        candidate = ((scaled @ vectors) * vectors).sum((0, 2))
        lower = max(lower, float(candidate.sum()))
        valid = _made_valid(candidate, scaled)
        if float(valid.sum()) < upper:
            upper, constants = float(valid.sum()), valid
        if upper - lower <= tolerance * upper:
            break
    return SmoothnessSum(min(lower, upper) * top, upper * top, constants * top)


def _both_signs(hessian: Tensor) -> tuple[Tensor, int]:
    """All matrices that the constants must dominate, in a stack, and their size."""
    hessians = symmetric(hessian, "hessian").reshape(-1, *hessian.shape[-2:])
    lowest = torch.linalg.eigvalsh(hessians)[:, 0]
    convex = bool((lowest >= -1e-14 * hessians.abs().max()).all())  # then dominating −∇²f asks for nothing more
    return (hessians if convex else torch.cat([hessians, -hessians])), hessians.shape[-1]


def _made_valid(constants: Tensor, matrices: Tensor) -> Tensor:
    """The constants times the smallest factor with which they dominate all matrices."""
    # A coordinate in which nothing curves may have the constant 0; a little above zero it can be divided by.
    constants = constants.clamp_min(1e-12 * float(constants.max().clamp_min(1e-300)))
    roots = constants.rsqrt()
    factor = float(torch.linalg.eigvalsh(roots.unsqueeze(-1) * matrices * roots).max())
    return constants * factor


def _import_cvxpy() -> ModuleType:
    try:
        import cvxpy
    except ImportError as error:
        raise ImportError(
            "egop.theory.smoothness_constants solves a semidefinite programme with cvxpy, which is not installed. "
            "Install it with pip install 'egop[theory]', or use egop.theory.smoothness_sum_bounds, which needs no "
            "solver."
        ) from error
    return cvxpy
