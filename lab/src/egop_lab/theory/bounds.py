"""Bounds on the Hessian, and on the sum of coordinate-wise smoothness constants in both coordinate systems."""

import itertools
import math

import torch
from torch import Tensor

from egop import Spectrum
from egop_lab.theory.common import eigenbasis, symmetrize

_MAX_EXHAUSTIVE = 12  # try every sign vector up to this dimension


def egop_error(hessian_lipschitz: float, *, hessian_norm: float, third_moment: float, fourth_moment: float) -> float:
    r"""Bound the distance between the EGOP matrix and that of the quadratic with the Hessian at the minimum.

    .. math:: \gamma = 2 H \lambda_1(\nabla^2 f^*) M_3 + H^2 M_4, \qquad M_p = \mathbb{E}_\rho \|\theta - \theta^*\|^p

    Args:
        third_moment: :math:`M_3`, at most the cube of the diameter.
        fourth_moment: :math:`M_4`.

    Example:
        >>> theory.egop_error(0.5, hessian_norm=2.0, third_moment=1.0, fourth_moment=4.0)
        3.0

    Reference: Lemma 2, the definition of gamma.
    """
    return 2 * hessian_lipschitz * hessian_norm * third_moment + hessian_lipschitz**2 * fourth_moment


def smoothness_lower_bound(egop: Tensor, *, scale: float, gamma: float = 0.0) -> float:
    r"""Bound the sum of smoothness constants in the original coordinates from below.

    .. math::
        \|L\|_1 \ge \frac{d}{2c} \max_{\nu \in \{\pm d^{-1/2}\}^d}
        \frac{\langle \nu, P \nu \rangle - \gamma}{\sqrt{\lambda_1(P) + \gamma}}

    The maximum is exact up to dimension 12. Above that it is a hard combinatorial problem, so a local search starts
    from the signs of the eigenvectors and flips one sign at a time. Every sign vector gives a valid bound, and this one
    is never below :func:`density_lower_bound`.

    Example:
        >>> round(theory.smoothness_lower_bound(torch.full((4, 4), 4.0), scale=1.0), 6)
        8.0

    Reference: Lemma 2.
    """
    matrix = symmetrize(egop)
    values, vectors = eigenbasis(matrix)
    if values[0] + gamma == 0:
        return 0.0
    size = len(matrix)
    largest = _largest_sign_form(matrix, vectors) / size
    return size / (2 * scale) * (largest - gamma) / math.sqrt(float(values[0]) + gamma)


def density_lower_bound(spectrum: Spectrum, *, scale: float, gamma: float = 0.0, dimension: int | None = None) -> float:
    r"""Bound the same sum from below, from eigenvalues and densities alone.

    .. math:: \|L\|_1 \ge \frac{d}{2c} \max_k \frac{\beta_k \lambda_k - \gamma}{\sqrt{\lambda_1 + \gamma}}

    Example:
        >>> round(theory.density_lower_bound(theory.compute_spectrum(torch.full((4, 4), 4.0)), scale=1.0), 6)
        8.0

    Reference: Corollary 1.
    """
    size = len(spectrum.eigenvalues) if dimension is None else dimension
    top = float(spectrum.eigenvalues[0])
    if top + gamma == 0:
        return 0.0
    largest = float((spectrum.density * spectrum.eigenvalues).max())
    return size / (2 * scale) * (largest - gamma) / math.sqrt(top + gamma)


def square_root(matrix: Tensor) -> Tensor:
    r"""Return the root :math:`X^{1/2}` of a positive semidefinite matrix. It preserves the order of such matrices.

    .. math:: X \preceq Y \implies X^{1/2} \preceq Y^{1/2}

    Squaring does not. Therefore a bound on the EGOP matrix gives one on the Hessian, but not the other way round.

    Args:
        matrix: X, symmetric.

    Example:
        >>> theory.square_root(torch.diag(torch.tensor([9.0, 4.0]))).tolist()
        [[3.0, 0.0], [0.0, 2.0]]

    Reference: the lemma on the order-preserving square root, Appendix A.1 (``lemma:order-preserving-square-root``).
    """
    values, vectors = torch.linalg.eigh(symmetrize(matrix))
    root: Tensor = vectors * values.clamp_min(0).sqrt() @ vectors.mT
    return root


def hessian_upper_bound(egop: Tensor, *, scale: float, gamma: float = 0.0) -> Tensor:
    r"""Return a matrix that dominates the Hessian at the minimum, in the coordinates of the EGOP matrix.

    .. math:: \nabla^2 f(\theta^*) \preceq \frac{1}{c} (P + \gamma I)^{1/2}

    It is diagonal in the eigenbasis, and its entries there are :func:`reparameterized_constants`.

    Example:
        >>> theory.hessian_upper_bound(torch.diag(torch.tensor([9.0, 4.0])), scale=0.5).tolist()
        [[6.0, 0.0], [0.0, 4.0]]

    Reference: the proof of Lemma 3 (``claim:reparam-coor-UB``), which uses that roots preserve the order.
    """
    matrix = symmetrize(egop)
    return square_root(matrix + gamma * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)) / scale


def reparameterized_constants(
    eigenvalues: Tensor, *, scale: float, gamma: float = 0.0, hessian_lipschitz: float = 0.0, diameter: float = 0.0
) -> Tensor:
    r"""Return smoothness constants that hold in the EGOP eigenbasis, one per coordinate.

    .. math:: \tilde L_i = \frac{1}{c} \sqrt{\lambda_i + \gamma} + H D

    Example:
        >>> theory.reparameterized_constants(torch.tensor([9.0, 4.0]), scale=0.5).tolist()
        [6.0, 4.0]

    Reference: the proof of Lemma 3.
    """
    return (eigenvalues.double().clamp_min(0) + gamma).sqrt() / scale + hessian_lipschitz * diameter


def reparameterized_upper_bound(
    eigenvalues: Tensor, *, scale: float, gamma: float = 0.0, hessian_lipschitz: float = 0.0, diameter: float = 0.0
) -> float:
    r"""Bound the sum of smoothness constants in the EGOP eigenbasis from above.

    .. math:: \|\tilde L\|_1 \le d \left( \frac{\sqrt\gamma}{c} + H D \right) + \frac{1}{c} \sum_i \sqrt{\lambda_i}

    Example:
        >>> theory.reparameterized_upper_bound(torch.tensor([9.0, 4.0]), scale=0.5)
        10.0

    Reference: Lemma 3.
    """
    quadratic = reparameterized_constants(eigenvalues, scale=scale)
    return float(quadratic.sum()) + len(eigenvalues) * (math.sqrt(gamma) / scale + hessian_lipschitz * diameter)


def _largest_sign_form(matrix: Tensor, vectors: Tensor) -> float:
    """Return the largest ``sᵀPs`` over sign vectors s: exact in low dimension, a local maximum otherwise."""
    size = len(matrix)
    if size <= _MAX_EXHAUSTIVE:
        rest = itertools.product((1.0, -1.0), repeat=size - 1)  # s and −s give the same value
        signs = torch.tensor([(1.0, *tail) for tail in rest], dtype=torch.float64, device=matrix.device)
        return float(((signs @ matrix) * signs).sum(-1).max())
    signs = torch.where(vectors.mT < 0, -1.0, 1.0).to(matrix)  # one row per eigenvector
    for _ in range(10 * size):
        # Flipping s_i changes the form by −4 s_i (Σ_j P_ij s_j) + 4 P_ii.
        gains = 4 * (matrix.diagonal() - signs * (signs @ matrix))
        best, index = gains.max(-1)
        if best.max() <= 1e-12 * matrix.abs().max():
            break
        rows = (best > 0).nonzero().squeeze(-1)
        signs[rows, index[rows]] *= -1
    return float(((signs @ matrix) * signs).sum(-1).max())
