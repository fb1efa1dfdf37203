"""Guarantees for Adagrad with exact gradients: regret on a convex set, and gradient norms without convexity."""

import math

from torch import Tensor


def regret_bound(
    smoothness_sum: float, *, diameter: float, lr: float, steps: int, eps: float = 0.0, extent: float | None = None
) -> float:
    r"""Bound the averaged regret of Adagrad on a convex set, for a convex objective with exact gradients.

    .. math::
        \frac1T \sum_{t<T} f(\theta_t) - f(\theta^*) \le
        \left( \eta + \frac{D_\infty^2}{\eta} \right)^2 \frac{\|L\|_1}{T} + \frac{\varepsilon D_2^2}{\eta T}

    The sum :math:`\|L\|_1` and the extent of the original coordinates give the guarantee for these. That sum times
    :func:`smoothness_ratio_bound`, with the extent in the eigenbasis, gives the guarantee for the eigenbasis, constants
    included. On a ball both extents are the diameter, and this is the right-hand side of Theorem 1. Without ``eps`` the
    best learning rate is the extent, and the bound is then :math:`4 D_\infty^2 \|L\|_1 / T`.

    Args:
        smoothness_sum: the sum of the coordinate-wise smoothness constants of f. The proof takes steps of size
            :math:`\nabla f / L` from an iterate, so constants that hold on the whole space are safe.
        eps: :math:`\varepsilon` of :class:`BallConstrainedAdagrad`.
        extent: :math:`D_\infty`, the largest difference in one coordinate between two points of the set, see
            :func:`box_extent`; by default the diameter, as for a ball.

    Example:
        >>> theory.regret_bound(3.0, diameter=2.0, lr=1.0, steps=100, eps=1.0)
        0.79
        >>> theory.regret_bound(3.0, diameter=2.0, lr=1.0, steps=100, eps=1.0, extent=1.0)
        0.16

    Reference: Theorem 1 and the inequality after it; for sets other than balls, the lemma on convergence for convex
    objectives, Appendix A.1 (``lemma:convex-cvgnce``).
    """
    widest = diameter if extent is None else extent
    return ((lr + widest**2 / lr) ** 2 * smoothness_sum + eps * diameter**2 / lr) / steps


def box_extent(sides: Tensor, basis: Tensor | None = None) -> float:
    r"""Return the extent :math:`D_\infty` of a box, in its own coordinates or in another basis.

    .. math:: \tilde D_\infty = \max_i \sum_j |V_{ji}| s_j

    A ball has the same extent in every basis. The extent of a cube grows by up to :math:`\sqrt d`, and that of a box
    along the axes of the eigenbasis shrinks by as much.

    Args:
        sides: s, the side lengths of the box.
        basis: V, whose columns are the new axes in the coordinates of the box; by default the box's own axes.

    Example:
        >>> theory.box_extent(torch.ones(4)), theory.box_extent(torch.ones(4), torch.full((4, 4), 0.5))
        (1.0, 2.0)

    Reference: the remark after the lemma on convergence for convex objectives, Appendix A.1 (``lemma:convex-cvgnce``).
    """
    lengths = sides.detach().double()
    if basis is None:
        return float(lengths.max())
    return float((basis.detach().double().abs().mT @ lengths).max())


def gradient_norm_bound(
    smoothness_sum: float, *, gap: float, dimension: int, lr: float, steps: int, eps: float
) -> float:
    r"""Bound the mean 1-norm of the gradients that unconstrained Adagrad sees; f need not be convex.

    .. math::
        \frac1T \sum_{t=1}^T \|\nabla f(\theta_t)\|_1 \le \frac{S}{\sqrt T}, \qquad
        S = \frac{\Delta}{\eta} + d \varepsilon + \eta \|L\|_1 \log \frac{S}{\varepsilon}

    where S is the larger solution. The paper states the bound up to a constant, with the logarithm of an unspecified
    polynomial; S is what its argument gives. A step changes f by at most
    :math:`-\eta \sum_i g_i^2 / \sqrt{v_i} + \frac{\eta^2}{2} \sum_i L_i g_i^2 / v_i`. Summed over all steps, the first
    part is at least :math:`\eta \sum_i (\sqrt{v_i} - \varepsilon)` and the second at most
    :math:`\eta^2 \sum_i L_i \log(\sqrt{v_i} / \varepsilon)`, where v is its final value. So
    :math:`\sum_i \sqrt{v_i} \le S`, and by Cauchy-Schwarz :math:`\sqrt T` times the mean is at most that sum.

    The sum of the original coordinates gives the guarantee for these; that sum times :func:`smoothness_ratio_bound`
    gives the one for the eigenbasis. Each is about gradients in its own coordinates. Both bound the Euclidean norm,
    which does not depend on the coordinates.

    Args:
        smoothness_sum: the sum of the coordinate-wise smoothness constants of f where the iterates are.
        gap: :math:`\Delta`, the loss at the start minus the infimum.
        eps: :math:`\varepsilon`, inside the root as in :class:`BallConstrainedAdagrad`; positive.

    Example:
        >>> round(theory.gradient_norm_bound(0.0, gap=2.0, dimension=10, lr=0.5, steps=100, eps=0.1), 6)
        0.5
        >>> round(theory.gradient_norm_bound(3.0, gap=2.0, dimension=10, lr=0.5, steps=100, eps=0.1), 6)
        1.220688

    Reference: the theorem on convergence for non-convex objectives, Appendix A.1 (``lemma:nonconvex-cvgnce``).
    """
    constant, factor = gap / lr + dimension * eps, lr * smoothness_sum
    # log z ≤ z/k + log k − 1 with k = 2 factor / eps gives a first bound on S. Newton's method descends from there and
    # stays above S, since S minus the right-hand side is convex.
    bound = 2 * constant + 2 * factor * max(1.0, math.log(max(2 * factor / eps, 1.0)))
    for _ in range(100):
        excess = bound - constant - factor * math.log(bound / eps)
        if excess <= 1e-15 * bound:
            break
        bound -= excess / (1 - factor / bound)
    return bound / math.sqrt(steps)
