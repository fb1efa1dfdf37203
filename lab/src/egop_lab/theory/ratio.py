"""How much the EGOP eigenbasis reduces the smoothness constants, as far as the spectrum can tell."""

import math

import torch
from torch import Tensor

from egop import Spectrum
from egop_lab.theory.common import eigenbasis, symmetrize


def compute_spectrum(egop: Tensor) -> Spectrum:
    r"""Return the spectrum of a given EGOP matrix.

    Example:
        >>> spectrum = theory.compute_spectrum(torch.diag(torch.tensor([1.0, 16.0])))
        >>> spectrum.eigenvalues.tolist(), spectrum.stable_rank, spectrum.density.tolist()
        ([16.0, 1.0], 1.25, [0.5, 0.5])

    Reference: Section 2.
    """
    values, vectors = eigenbasis(symmetrize(egop))
    return Spectrum(eigenvalues=values, density=densities(vectors), samples=0)


def densities(vectors: Tensor) -> Tensor:
    r"""Return the densities :math:`\beta_k = \|v_k\|_1^2 / d`, from 1/d (a coordinate axis) to 1 (equal entries).

    Args:
        vectors: unit vectors, as columns.

    Example:
        >>> theory.densities(torch.tensor([[1.0, 0.5], [0.0, 0.5], [0.0, -0.5], [0.0, 0.5]])).tolist()
        [0.25, 1.0]

    Reference: Section 3.
    """
    return vectors.detach().abs().sum(0, dtype=torch.float64).square() / len(vectors)


def leading_ratio(spectrum: Spectrum, dimension: int | None = None) -> float:
    r"""Return the leading term :math:`\mathrm{sr} / (d \beta_1)` of the smoothness ratio.

    For a quadratic with rho centred at the minimum it is itself a bound; the bound that is proven in general is
    :func:`smoothness_ratio_bound`.

    Example:
        >>> flat = theory.compute_spectrum(torch.full((4, 4), 1.0))  # one direction, dense
        >>> round(theory.leading_ratio(flat), 6)
        0.25

    Reference: Section 3, after Theorem 1.
    """
    size = len(spectrum.eigenvalues) if dimension is None else dimension
    return spectrum.stable_rank / (size * float(spectrum.density[0]))


def smoothness_ratio_bound(spectrum: Spectrum, delta: float = 0.0, dimension: int | None = None) -> float:
    r"""Bound the sum of smoothness constants in the eigenbasis divided by that in the original coordinates.

    .. math::
        \frac{\|\tilde L\|_1}{\|L\|_1} \le \frac{2 \sqrt{1 + \delta}}{\beta_1 - \delta}
        \left( \frac{\mathrm{sr}}{d} + \sqrt\delta \left(1 + \frac{1}{\sqrt d}\right) \right)

    The paper states it up to a constant; this is the constant of its proof. It uses :math:`c \sqrt d \le D`, which
    holds because rho has covariance :math:`c^2 I` and lives in a set of diameter D.

    Args:
        delta: how far f is from a quadratic, see :func:`needed_delta`; 0 for a quadratic.

    Returns:
        The bound; infinity if ``delta`` is at least the leading density, where there is none.

    Example:
        >>> flat = theory.compute_spectrum(torch.full((4, 4), 1.0))
        >>> round(theory.smoothness_ratio_bound(flat), 6), theory.smoothness_ratio_bound(flat, delta=1.0)
        (0.5, inf)

    Reference: the theorem on the ratio of smoothness constants, Appendix A.1.
    """
    size = len(spectrum.eigenvalues) if dimension is None else dimension
    margin = float(spectrum.density[0]) - delta
    if margin <= 0:
        return math.inf
    error = math.sqrt(delta) * (1 + 1 / math.sqrt(size))
    return 2 * math.sqrt(1 + delta) / margin * (spectrum.stable_rank / size + error)


def largest_hessian_lipschitz(delta: float, *, egop_norm: float, hessian_norm: float, diameter: float) -> float:
    r"""Return the largest Lipschitz constant H of the Hessian that Assumption 2 allows.

    .. math:: H \le \frac{\sqrt{\delta \lambda_1(P) + D^2 \lambda_1(\nabla^2 f^*)^2} - D \lambda_1(\nabla^2 f^*)}{D^2}

    Args:
        delta: the accepted error; the paper requires it to be below :math:`\beta_1^2`.
        diameter: D, the diameter of the set that contains rho and all iterates.

    Example:
        >>> theory.largest_hessian_lipschitz(0.25, egop_norm=36.0, hessian_norm=2.0, diameter=2.0)
        0.25

    Reference: Assumption 2.
    """
    slope, error = diameter * hessian_norm, delta * egop_norm
    if error == 0:
        return 0.0
    # sqrt(a + b²) − b without cancellation for small a
    return error / (math.hypot(math.sqrt(error), slope) + slope) / diameter**2


def needed_delta(hessian_lipschitz: float, *, egop_norm: float, hessian_norm: float, diameter: float) -> float:
    r"""Return the smallest delta for which Assumption 2 holds, given H: the inverse of the function above.

    .. math:: \delta = \frac{2 H D^3 \lambda_1(\nabla^2 f^*) + H^2 D^4}{\lambda_1(P)}

    The paper's guarantees require :math:`\delta < \beta_1^2`; the proof only needs :math:`\delta < \beta_1`.

    Args:
        diameter: D, the diameter of the set that contains rho and all iterates.

    Example:
        >>> theory.needed_delta(0.25, egop_norm=36.0, hessian_norm=2.0, diameter=2.0)
        0.25

    Reference: Assumption 2.
    """
    change = hessian_lipschitz * diameter**2
    return change * (2 * diameter * hessian_norm + change) / egop_norm
