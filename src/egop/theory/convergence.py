"""What is guaranteed of Adagrad with exact gradients: its regret within a set, its gradients where f is not convex."""

from __future__ import annotations

import math

from torch import Tensor

from egop.theory.checks import not_negative, positive


def regret_bound(
    smoothness_sum: float, *, diameter: float, lr: float, steps: int, eps: float = 0.0, extent: float | None = None
) -> float:
    r"""The bound on the averaged regret of Adagrad on a convex set, for a convex objective with exact gradients.

    .. math::
        \frac1T \sum_{t<T} f(\theta_t) - f(\theta^*) \le
        \left( \eta + \frac{D_\infty^2}{\eta} \right)^2 \frac{\|L\|_1}{T} + \frac{\varepsilon D_2^2}{\eta T}

    With the sum :math:`\|L\|_1` and the extent of original coordinates this is the guarantee there. With that sum times
    :func:`smoothness_ratio_bound` and the extent in the eigenbasis it is the guarantee there, constants included. On a
    ball, for which both extents are the diameter, that is the right-hand side of Theorem 1. Without ``eps`` the best
    learning rate is the extent, and the bound then :math:`4 D_\infty^2 \|L\|_1 / T`.

    Args:
        smoothness_sum: the sum of constants with which f is coordinate-wise smooth. The argument takes steps of size
            :math:`\nabla f / L` from an iterate: constants that hold on the whole space are safe.
        diameter: :math:`D_2`, of the set.
        lr: :math:`\eta`.
        steps: how many, T.
        eps: :math:`\varepsilon` of :class:`egop.BallConstrainedAdagrad`.
        extent: :math:`D_\infty`, how much one coordinate can differ between two points of the set, see
            :func:`box_extent`; the diameter by default, as it is for a ball.

    Example:
        >>> egop.theory.regret_bound(3.0, diameter=2.0, lr=1.0, steps=100, eps=1.0)
        0.79
        >>> egop.theory.regret_bound(3.0, diameter=2.0, lr=1.0, steps=100, eps=1.0, extent=1.0)
        0.16

    Reference: Theorem 1 and the inequality after it; for other sets than balls, the lemma on convergence for convex
    objectives, Appendix A.1 (``lemma:convex-cvgnce``).
    """
    not_negative(smoothness_sum=smoothness_sum, eps=eps)
    positive(diameter=diameter, lr=lr, steps=steps)
    widest = diameter if extent is None else extent
    positive(extent=widest)
    if widest > diameter * (1 + 1e-9):
        raise ValueError(f"Invalid extent value: {widest}. Must not be above the diameter, {diameter}.")
    return ((lr + widest**2 / lr) ** 2 * smoothness_sum + eps * diameter**2 / lr) / steps


def box_extent(sides: Tensor, basis: Tensor | None = None) -> float:
    r"""The extent :math:`D_\infty` of a box, in its own coordinates or in another basis.

    .. math:: \tilde D_\infty = \max_i \sum_j |V_{ji}| s_j

    A ball has the same extent in every basis; a cube's grows by up to :math:`\sqrt d`, and that of a box along the axes
    of the eigenbasis shrinks by as much.

    Args:
        sides: s, the lengths of the box along its axes.
        basis: V, whose columns are the new axes, in the coordinates of the box; those by default.

    Example:
        >>> egop.theory.box_extent(torch.ones(4)), egop.theory.box_extent(torch.ones(4), torch.full((4, 4), 0.5))
        (1.0, 2.0)

    Reference: the remark after the lemma on convergence for convex objectives, Appendix A.1 (``lemma:convex-cvgnce``).
    """
    lengths = sides.detach().double()
    if lengths.dim() != 1 or len(lengths) == 0 or not (lengths >= 0).all():
        raise ValueError("Invalid sides value. Must be a vector of lengths, none of them negative.")
    if basis is None:
        return float(lengths.max())
    if basis.dim() != 2 or len(basis) != len(lengths):
        raise ValueError(f"Invalid basis value: shape {tuple(basis.shape)}. Must have {len(lengths)} rows.")
    return float((basis.detach().double().abs().mT @ lengths).max())


def gradient_norm_bound(
    smoothness_sum: float, *, gap: float, dimension: int, lr: float, steps: int, eps: float
) -> float:
    r"""The bound on the mean 1-norm of the gradients that unconstrained Adagrad sees, convex or not.

    .. math::
        \frac1T \sum_{t=1}^T \|\nabla f(\theta_t)\|_1 \le \frac{S}{\sqrt T}, \qquad
        S = \frac{\Delta}{\eta} + d \varepsilon + \eta \|L\|_1 \log \frac{S}{\varepsilon}

    where S is the larger solution. The paper states it up to a constant, with the logarithm of an unspecified
    polynomial; S is what the argument gives. A step changes f by at most
    :math:`-\eta \sum_i g_i^2 / \sqrt{v_i} + \frac{\eta^2}{2} \sum_i L_i g_i^2 / v_i`. Summed over all steps, the first
    part is at least :math:`\eta \sum_i (\sqrt{v_i} - \varepsilon)` and the second at most
    :math:`\eta^2 \sum_i L_i \log(\sqrt{v_i} / \varepsilon)`, with v as it is at the end. So
    :math:`\sum_i \sqrt{v_i} \le S`, and by Cauchy-Schwarz :math:`\sqrt T` times the mean is at most that sum.

    With the sum of original coordinates this is the guarantee there, and with that sum times
    :func:`smoothness_ratio_bound` the one for the eigenbasis. Each is about gradients in its own coordinates; either
    bounds their Euclidean norm, which is the same in both.

    Args:
        smoothness_sum: the sum of constants with which f is coordinate-wise smooth where the iterates are.
        gap: :math:`\Delta`, from the loss at the start down to the infimum.
        dimension: d.
        lr: :math:`\eta`.
        steps: how many, T.
        eps: :math:`\varepsilon`, inside the root as in :class:`egop.BallConstrainedAdagrad`; not zero.

    Example:
        >>> round(egop.theory.gradient_norm_bound(0.0, gap=2.0, dimension=10, lr=0.5, steps=100, eps=0.1), 6)
        0.5
        >>> round(egop.theory.gradient_norm_bound(3.0, gap=2.0, dimension=10, lr=0.5, steps=100, eps=0.1), 6)
        1.220688

    Reference: the theorem on convergence for non-convex objectives, Appendix A.1 (``lemma:nonconvex-cvgnce``).
    """
    not_negative(smoothness_sum=smoothness_sum, gap=gap)
    positive(dimension=dimension, lr=lr, steps=steps, eps=eps)
    straight, bent = gap / lr + dimension * eps, lr * smoothness_sum
    # log z ≤ z/k + log k − 1 with k = 2 bent / eps bounds S. From above, Newton's method stays above: S minus the
    # right-hand side is convex.
    bound = 2 * straight + 2 * bent * max(1.0, math.log(max(2 * bent / eps, 1.0)))
    for _ in range(100):
        excess = bound - straight - bent * math.log(bound / eps)
        if excess <= 1e-15 * bound:
            break
        bound -= excess / (1 - bent / bound)
    return bound / math.sqrt(steps)
