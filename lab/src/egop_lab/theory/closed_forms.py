"""Closed forms: EGOP matrices, spectra, Hessians and their Lipschitz constants for particular problems."""

from typing import Literal

import torch
from torch import Tensor

from egop_lab.theory.common import symmetrize


def quadratic_egop(hessian: Tensor, gradient: Tensor, *, scale: float = 1.0) -> Tensor:
    r"""Return the EGOP matrix of a quadratic, for any rho with covariance :math:`c^2 I`.

    .. math:: P = c^2 (\nabla^2 f)^2 + g g^\top

    Args:
        gradient: g, the gradient at the centre of rho.

    Example:
        >>> theory.quadratic_egop(torch.tensor([[2.0]]), torch.tensor([3.0])).tolist()
        [[13.0]]

    Reference: the lemma that relates the EGOP to the Hessian, Appendix A.1, where H is 0.
    """
    matrix, vector = symmetrize(hessian), gradient.detach().double()
    return scale**2 * matrix @ matrix + torch.outer(vector, vector)


def least_squares_egop(data: Tensor, targets: Tensor, *, center: Tensor | None = None, scale: float = 1.0) -> Tensor:
    r"""Return the EGOP matrix of :math:`\frac12 \|A \theta - y\|^2`, by default for a standard normal rho.

    .. math:: P = c^2 (A^\top A)^2 + g g^\top, \qquad g = A^\top (A \theta_c - y)

    which is :math:`(A^\top A)^2 + (A^\top y)(A^\top y)^\top` for :math:`\theta_c = 0` and :math:`c = 1`.

    Args:
        data: A, one row per observation.
        targets: y.
        center: :math:`\theta_c`, the mean of rho; the origin by default.

    Example:
        >>> theory.least_squares_egop(torch.eye(2), torch.tensor([0.0, 3.0])).tolist()
        [[1.0, 0.0], [0.0, 10.0]]

    Reference: the lemma on least squares, Appendix A.2.
    """
    matrix, values = data.detach().double(), targets.detach().double()
    residual = -values if center is None else matrix @ center.detach().double() - values
    return quadratic_egop(matrix.mT @ matrix, matrix.mT @ residual, scale=scale)


def least_squares_interlacing(data: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    r"""Bound each eigenvalue of the least-squares EGOP matrix from both sides, for a standard normal rho.

    .. math::
        \sigma_1^4 \le \lambda_1 \le \sigma_1^4 + \|A^\top y\|^2, \qquad
        \sigma_k^4 \le \lambda_k \le \sigma_{k-1}^4 \quad (k \ge 2)

    So :math:`\lambda_k / \lambda_1 \le (\sigma_{k-1} / \sigma_1)^4`: if the data decay, so does the EGOP spectrum.

    Args:
        data: A, one row per observation.
        targets: y.

    Returns:
        The lower and the upper bounds, in descending order of the eigenvalues.

    Example:
        >>> theory.least_squares_interlacing(torch.diag(torch.tensor([2.0, 1.0])), torch.tensor([1.0, 1.0]))
        (tensor([16.,  1.], dtype=torch.float64), tensor([21., 16.], dtype=torch.float64))

    Reference: the lemma on least squares, Appendix A.2. (Its proof prints the interval one index too low.)
    """
    matrix, values = data.detach().double(), targets.detach().double()
    lower = matrix.new_zeros(matrix.shape[1])
    singular = torch.linalg.svdvals(matrix)[: len(lower)]
    lower[: len(singular)] = singular**4
    upper = lower.roll(1)
    upper[0] = lower[0] + (matrix.mT @ values).square().sum()
    return lower, upper


def data_decay_bound(data: Tensor, inner_egop: Tensor) -> Tensor:
    r"""Bound the decay :math:`\lambda_k / \lambda_1` for a loss of the form :math:`f(\theta) = h(A \theta)`.

    .. math::
        \frac{\lambda_k}{\lambda_1} \le \left( \frac{\sigma_k}{\sigma_1} \right)^2 \frac{\lambda_1(M)}{\lambda_n(M)}

    Args:
        data: A, square and nonsingular.
        inner_egop: :math:`M = \mathbb{E}[\nabla h(A\theta) \nabla h(A\theta)^\top]`.

    Example:
        >>> theory.data_decay_bound(torch.diag(torch.tensor([2.0, 1.0])), torch.eye(2)).tolist()
        [1.0, 0.25]

    Reference: the lemma on losses of :math:`A \theta`, Appendix A.2.
    """
    inner = torch.linalg.eigvalsh(symmetrize(inner_egop))
    singular = torch.linalg.svdvals(data.detach().double())
    bound: Tensor = (singular / singular[0]).square() * (inner[-1] / inner[0].clamp_min(0))
    return bound


def matrix_factorization_lipschitz(
    measurements: Tensor, radius: float, *, norm: Literal["frobenius", "operator"] = "frobenius"
) -> float:
    r"""Return a Lipschitz constant of the Hessian of a matrix factorisation in the ball of radius B around the origin.

    .. math::
        f(L, R) = \sum_{i=1}^m (\langle A_i, L R^\top \rangle - b_i)^2, \qquad H = 12 B \sum_i \|A_i\|_F^2

    A factor in front of the objective, such as one half, multiplies the constant.

    Args:
        measurements: the :math:`A_i`, stacked: m x d₁ x d₂.
        radius: B, a bound on the norm of (L, R).
        norm: ``"frobenius"`` for the sum of squares that the paper states; ``"operator"`` for the squared norm of the
            map :math:`X \mapsto (\langle A_i, X \rangle)_i`, which the proof uses and which is never larger.

    Example:
        >>> theory.matrix_factorization_lipschitz(torch.ones(3, 2, 2), 0.5)
        72.0

    Reference: the lemma on matrix factorisation, Appendix A.1.
    """
    rows = measurements.detach().double().flatten(1)
    square = rows.square().sum() if norm == "frobenius" else torch.linalg.matrix_norm(rows, 2).square()
    return 12 * radius * float(square)


def matrix_factorization_curvature(
    measurements: Tensor, targets: Tensor, point: tuple[Tensor, Tensor], direction: tuple[Tensor, Tensor]
) -> float:
    r"""Evaluate the quadratic form :math:`\langle v, \nabla^2 f(\theta) v \rangle` for a matrix factorisation.

    .. math::
        D^2 f(L, R)[U, V] = 2 \|\mathcal{A}(U R^\top + L V^\top)\|^2
        + 4 \langle \mathcal{A}(L R^\top) - b, \mathcal{A}(U V^\top) \rangle

    for :math:`f(L, R) = \|\mathcal{A}(L R^\top) - b\|^2` with :math:`\mathcal{A}(X) = (\langle A_i, X \rangle)_i`.

    Args:
        measurements: the :math:`A_i`, stacked: m x d₁ x d₂.
        targets: b.
        point: :math:`\theta = (L, R)`, d₁ x k and d₂ x k.
        direction: :math:`v = (U, V)`, of the same shapes.

    Example:
        >>> one, two = torch.ones(1, 1), torch.full((1, 1), 2.0)
        >>> theory.matrix_factorization_curvature(torch.ones(1, 1, 1), torch.ones(1), (one, two), (one, one))
        22.0

    Reference: the lemma on the quadratic form of the Hessian, Appendix A.1
    (``lemma:linear-measurement-overparam-Hessian-bilinear``).
    """
    (L, R), (U, V) = (tuple(part.detach().double() for part in pair) for pair in (point, direction))
    rows = measurements.detach().double().flatten(1)
    first, second = rows @ (U @ R.mT + L @ V.mT).flatten(), rows @ (U @ V.mT).flatten()
    residual = rows @ (L @ R.mT).flatten() - targets.detach().double()
    return 2 * float(first.square().sum()) + 4 * float(residual @ second)


def matrix_factorization_blocks(
    data: Tensor, left: Tensor, right: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    r"""Return the diagonal Hessian blocks of :math:`\frac12 \|A L R^\top - Y\|_F^2`: Kronecker products at every point.

    .. math::
        \nabla_{LL}^2 f = A^\top A \otimes R^\top R, \qquad \nabla_{RR}^2 f = I \otimes L^\top A^\top A L

    over the entries of L and of R in torch's order; Y does not appear. For a general measurement map, as in
    :func:`matrix_factorization_curvature`, the blocks are not Kronecker products.

    Args:
        data: the matrix A.
        left: the factor L.
        right: the factor R.

    Returns:
        The two factors of the L block and the two of the R block; ``torch.kron`` of a pair is the block.

    Example:
        >>> A, L, R = torch.tensor([[2.0]]), torch.tensor([[3.0]]), torch.tensor([[1.0], [5.0]])
        >>> left, right = theory.matrix_factorization_blocks(A, L, R)
        >>> torch.kron(*left).tolist(), torch.kron(*right).tolist()
        ([[104.0]], [[36.0, 0.0], [0.0, 36.0]])

    Reference: Section 6.2 on low-rank matrix factorisation (``fig:LRMF``).
    """
    A, L, R = (part.detach().double() for part in (data, left, right))
    return (A.mT @ A, R.mT @ R), (torch.eye(len(R), dtype=R.dtype, device=R.device), (A @ L).mT @ (A @ L))
