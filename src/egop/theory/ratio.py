"""How much smaller the smoothness constants get in the EGOP eigenbasis, as far as the spectrum tells."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from egop.basis import Spectrum, density
from egop.numerics import eigenbasis
from egop.theory.checks import not_negative, positive, symmetric


def spectrum_of(egop: Tensor) -> Spectrum:
    r"""The spectrum of an EGOP matrix that is known as a matrix.

    Args:
        egop: the matrix :math:`P = \mathbb{E}[\nabla f \nabla f^\top]`.

    Example:
        >>> spectrum = egop.theory.spectrum_of(torch.diag(torch.tensor([1.0, 16.0])))
        >>> spectrum.eigenvalues.tolist(), spectrum.stable_rank, spectrum.density.tolist()
        ([16.0, 1.0], 1.25, [0.5, 0.5])

    Reference: Section 2.
    """
    values, vectors = eigenbasis(symmetric(egop, "egop"))
    return Spectrum(eigenvalues=values, density=density(vectors), samples=0)


def stable_rank(eigenvalues: Tensor) -> float:
    r"""The stable rank :math:`\mathrm{sr} = \sum_i \sqrt{\lambda_i} / \sqrt{\lambda_1}`, from 1 to d.

    Args:
        eigenvalues: of the EGOP matrix, in any order.

    Example:
        >>> egop.theory.stable_rank(torch.tensor([16.0, 4.0, 1.0, 0.0]))
        1.75

    Reference: Section 3, the definition of sr(f).
    """
    if eigenvalues.dim() != 1 or len(eigenvalues) == 0:
        raise ValueError(f"Invalid eigenvalues value: shape {tuple(eigenvalues.shape)}. Must be a vector.")
    values = eigenvalues.detach().double().sort(descending=True).values
    if not values[-1] >= -1e-8 * values[0].abs():  # decompositions leave a little below zero
        raise ValueError(f"Invalid eigenvalues value: {float(values[-1])}. Must not be negative.")
    values = values.clamp_min(0)
    return Spectrum(eigenvalues=values, density=torch.ones_like(values), samples=0).stable_rank


def densities(vectors: Tensor) -> Tensor:
    r"""The densities :math:`\beta_k = \|v_k\|_1^2 / d`, from 1/d (a coordinate axis) to 1 (all entries alike).

    Args:
        vectors: unit vectors, as columns.

    Example:
        >>> egop.theory.densities(torch.tensor([[1.0, 0.5], [0.0, 0.5], [0.0, -0.5], [0.0, 0.5]])).tolist()
        [0.25, 1.0]

    Reference: Section 3.
    """
    if vectors.dim() != 2 or vectors.numel() == 0:
        raise ValueError(f"Invalid vectors value: shape {tuple(vectors.shape)}. Must be a matrix of columns.")
    return density(vectors.detach())


def leading_ratio(spectrum: Spectrum, dimension: int | None = None) -> float:
    r"""The leading term :math:`\mathrm{sr} / (d \beta_1)` of the smoothness ratio: what decay and density promise.

    It is a bound by itself for a quadratic whose rho is centred at the minimum; in general the proven bound is
    :func:`smoothness_ratio_bound`.

    Args:
        spectrum: of the EGOP matrix.
        dimension: d, where the spectrum holds only the leading eigenvalues.

    Example:
        >>> flat = egop.theory.spectrum_of(torch.full((4, 4), 1.0))  # one direction, dense
        >>> round(egop.theory.leading_ratio(flat), 6)
        0.25

    Reference: Section 3, after Theorem 1.
    """
    size = len(spectrum.eigenvalues) if dimension is None else dimension
    return spectrum.stable_rank / (size * float(spectrum.density[0]))


def smoothness_ratio_bound(spectrum: Spectrum, delta: float = 0.0, dimension: int | None = None) -> float:
    r"""The proven bound on the sum of smoothness constants in the eigenbasis over that in original coordinates.

    .. math::
        \frac{\|\tilde L\|_1}{\|L\|_1} \le \frac{2 \sqrt{1 + \delta}}{\beta_1 - \delta}
        \left( \frac{\mathrm{sr}}{d} + \sqrt\delta \left(1 + \frac{1}{\sqrt d}\right) \right)

    The paper states it up to a constant; this is the constant that its proof gives, with :math:`c \sqrt d \le D`,
    which holds because rho, of covariance :math:`c^2 I`, lives in a set of diameter D.

    Args:
        spectrum: of the EGOP matrix.
        delta: how far f is from a quadratic, see :func:`needed_delta`; 0 for a quadratic.
        dimension: d, where the spectrum holds only the leading eigenvalues.

    Returns:
        The bound; infinity when ``delta`` is not below the leading density, where there is none.

    Example:
        >>> flat = egop.theory.spectrum_of(torch.full((4, 4), 1.0))
        >>> round(egop.theory.smoothness_ratio_bound(flat), 6), egop.theory.smoothness_ratio_bound(flat, delta=1.0)
        (0.5, inf)

    Reference: the theorem on the ratio of smoothness constants, Appendix A.1.
    """
    not_negative(delta=delta)
    size = len(spectrum.eigenvalues) if dimension is None else dimension
    room = float(spectrum.density[0]) - delta
    if room <= 0:
        return math.inf
    error = math.sqrt(delta) * (1 + 1 / math.sqrt(size))
    return 2 * math.sqrt(1 + delta) / room * (spectrum.stable_rank / size + error)


def largest_hessian_lipschitz(delta: float, *, egop_norm: float, hessian_norm: float, diameter: float) -> float:
    r"""The largest Lipschitz constant H of the Hessian that Assumption 2 allows.

    .. math:: H \le \frac{\sqrt{\delta \lambda_1(P) + D^2 \lambda_1(\nabla^2 f^*)^2} - D \lambda_1(\nabla^2 f^*)}{D^2}

    Args:
        delta: the error that is accepted, below :math:`\beta_1^2` in the paper.
        egop_norm: the largest eigenvalue of the EGOP matrix, :math:`\lambda_1(P)`.
        hessian_norm: the largest eigenvalue of the Hessian at the minimum.
        diameter: D, of the set that rho and all iterates stay in.

    Example:
        >>> egop.theory.largest_hessian_lipschitz(0.25, egop_norm=36.0, hessian_norm=2.0, diameter=2.0)
        0.25

    Reference: Assumption 2.
    """
    not_negative(delta=delta, egop_norm=egop_norm, hessian_norm=hessian_norm)
    positive(diameter=diameter)
    slope, error = diameter * hessian_norm, delta * egop_norm
    if error == 0:
        return 0.0
    # sqrt(a + b²) − b, written so that a small a does not cancel against b
    return error / (math.hypot(math.sqrt(error), slope) + slope) / diameter**2


def needed_delta(hessian_lipschitz: float, *, egop_norm: float, hessian_norm: float, diameter: float) -> float:
    r"""The smallest delta with which Assumption 2 holds for a given H; the inverse of the function above.

    .. math:: \delta = \frac{2 H D^3 \lambda_1(\nabla^2 f^*) + H^2 D^4}{\lambda_1(P)}

    The paper's guarantees ask for :math:`\delta < \beta_1^2`; the proof itself only needs :math:`\delta < \beta_1`.

    Args:
        hessian_lipschitz: the constant H.
        egop_norm: the largest eigenvalue of the EGOP matrix, :math:`\lambda_1(P)`.
        hessian_norm: the largest eigenvalue of the Hessian at the minimum.
        diameter: D, of the set that rho and all iterates stay in.

    Example:
        >>> egop.theory.needed_delta(0.25, egop_norm=36.0, hessian_norm=2.0, diameter=2.0)
        0.25

    Reference: Assumption 2.
    """
    not_negative(hessian_lipschitz=hessian_lipschitz, hessian_norm=hessian_norm)
    positive(egop_norm=egop_norm, diameter=diameter)
    bent = hessian_lipschitz * diameter**2
    return bent * (2 * diameter * hessian_norm + bent) / egop_norm
