"""Coordinate-wise smoothness constants of given Hessians: exact in few dimensions, bracketed in many."""

import importlib
import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from egop_lab.theory.common import symmetrize


class SmoothnessSum(NamedTuple):
    """Lower and upper bounds on the smallest sum of smoothness constants.

    Attributes:
        lower: no valid constants have a smaller sum.
        upper: the sum of ``constants``.
        constants: valid constants.

    Example:
        >>> bounds = theory.smoothness_sum_bounds(torch.diag(torch.tensor([2.0, 3.0])))
        >>> bounds.lower <= bounds.upper, bounds.constants.round(decimals=4).tolist()
        (True, [2.0, 3.0])
    """

    lower: float
    upper: float
    constants: Tensor


def smoothness_constants(hessian: Tensor) -> Tensor:
    r"""Solve a semidefinite programme for the coordinate-wise smoothness constants with the smallest sum.

    .. math:: \min_L \sum_i L_i \quad \text{with} \quad -\mathrm{diag}(L) \preceq \nabla^2 f \preceq \mathrm{diag}(L)

    This takes seconds up to about 50 dimensions, and needs cvxpy (``pip install 'egop-lab[theory]'``). Above that, use
    :func:`smoothness_sum_bounds`, which needs no solver.

    Returns:
        The constants in float64. They satisfy the inequalities up to rounding; their sum is minimal to about 1e-7.

    Example:
        >>> theory.smoothness_constants(torch.diag(torch.tensor([2.0, -3.0]))).round(decimals=4).tolist()
        [2.0, 3.0]

    Reference: Section 1 (Notation) for the constants, Appendix A.1 for their form as an inequality of matrices.
    """
    cvxpy: ModuleType = importlib.import_module("cvxpy")
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
        raise RuntimeError(f"The programme ended with status '{programme.status}'. Use smoothness_sum_bounds.")
    return _scale_to_valid(torch.from_numpy(constants.value).to(matrices) * top, matrices)


def smoothness_sum_bounds(hessian: Tensor, *, tolerance: float = 1e-6, iterations: int = 5000) -> SmoothnessSum:
    r"""Bound the smallest sum of smoothness constants from both sides, without a solver.

    The dual of the programme of :func:`smoothness_constants` gives every coordinate a unit vector :math:`u_i` and
    maximises :math:`\sum_{ij} M_{ij} \langle u_i, u_j \rangle` (summed over :math:`M = \pm\nabla^2 f`, each with its
    own part of the vectors). Vectors in few dimensions are enough, and a power iteration,
    :math:`u \leftarrow M u` normalised, increases the sum. Any such vectors give a lower bound; the constants read off
    from them, scaled until they are valid, give an upper bound. An iteration costs :math:`d^2 \sqrt{2d}`.

    Args:
        tolerance: stop when the bounds differ by this fraction.
        iterations: the most iterations; the bounds hold whenever it stops.

    Example:
        >>> bounds = theory.smoothness_sum_bounds(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> round(bounds.lower, 4), round(bounds.upper, 4)
        (6.0, 6.0)

    Reference: as for :func:`smoothness_constants`; the iteration is Burer and Monteiro's low-rank form of the
    programme, stepped as in Journée, Nesterov, Richtárik and Sepulchre, *Generalized Power Method* (2010).
    """
    matrices, size = _both_signs(hessian)
    top = float(matrices.abs().max())
    if top == 0:
        return SmoothnessSum(0.0, 0.0, matrices.new_zeros(size))
    scaled = matrices / top
    shift = max(0.0, -float(torch.linalg.eigvalsh(scaled).min()))  # a convex form ascends in every step
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
        valid = _scale_to_valid(candidate, scaled)
        if float(valid.sum()) < upper:
            upper, constants = float(valid.sum()), valid
        if upper - lower <= tolerance * upper:
            break
    return SmoothnessSum(min(lower, upper) * top, upper * top, constants * top)


def _both_signs(hessian: Tensor) -> tuple[Tensor, int]:
    """Return the matrices that the constants must dominate, stacked, and their size."""
    hessians = symmetrize(hessian).reshape(-1, *hessian.shape[-2:])
    lowest = torch.linalg.eigvalsh(hessians)[:, 0]
    convex = bool((lowest >= -1e-14 * hessians.abs().max()).all())  # then −∇²f adds no condition
    return (hessians if convex else torch.cat([hessians, -hessians])), hessians.shape[-1]


def _scale_to_valid(constants: Tensor, matrices: Tensor) -> Tensor:
    """Multiply the constants by the smallest factor with which they dominate all matrices."""
    # The constant of a flat coordinate may be 0; keep it slightly positive to divide by it.
    constants = constants.clamp_min(1e-12 * float(constants.max().clamp_min(1e-300)))
    roots = constants.rsqrt()
    factor = float(torch.linalg.eigvalsh(roots.unsqueeze(-1) * matrices * roots).max())
    return constants * factor
