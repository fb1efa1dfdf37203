"""Adagrad constrained to a ball: the optimizer that the paper's guarantees are about."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer


class BallConstrainedAdagrad(Optimizer):
    r"""Adagrad projected onto a ball in its own metric.

    .. math::
        H_t = \mathrm{diag}\Big(\varepsilon^2 I + \sum_{j \le t} g_j g_j^\top\Big)^{1/2}, \qquad
        \theta_{t+1} = \Pi_\Theta^{H_t} \big( \theta_t - \eta H_t^{-1} g_t \big), \qquad
        \Theta = \{ \theta : \|\theta - \theta_c\|_2 \le r \}

    where :math:`\Pi_\Theta^H(w) = \arg\min_{\theta \in \Theta} \langle \theta - w, H (\theta - w) \rangle`. While the
    iterates stay inside, this is ``torch.optim.Adagrad`` with ``initial_accumulator_value=eps**2, eps=0``.

    All parameters share **one ball**, however many tensors and groups there are: the paper's :math:`\theta` is the
    vector of all of them. Groups may differ in ``lr`` and ``eps``, but not in ``radius``. A parameter without a
    gradient does not move; the others are projected onto the part of the ball that it leaves them. The start may be
    outside the ball; the first step ends inside.

    In :class:`egop.ReparameterizedOptimizer` it is the same ball, because an orthonormal change of basis preserves
    distances. (``Auxiliary`` has more coordinates than parameters; its ball decodes to a subset.)

    Args:
        params: parameters, named parameters, or groups of them.
        lr: the step size :math:`\eta`.
        radius: r, the radius of the ball; infinity for no constraint.
        center: :math:`\theta_c`: ``None`` for the origin, or ``"start"`` for the parameters at the first step.
        eps: :math:`\varepsilon`, inside the root as in the paper.

    Example:
        >>> theta = torch.tensor([3.0, 0.5], requires_grad=True)
        >>> optimizer = theory.BallConstrainedAdagrad([theta], lr=0.1, radius=1.0)
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     (theta - torch.tensor([2.0, 0.0])).square().sum().backward()
        ...     _ = optimizer.step()
        >>> round(theta.norm().item(), 4)  # the point of the ball nearest to (2, 0)
        1.0

    Reference: Algorithm 2 and Theorem 1, whose right-hand side is :func:`regret_bound`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        radius: float = 1.0,
        center: Literal["start"] | None = None,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(params, {"lr": lr, "radius": radius, "center": center, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step; the closure, if given, reevaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        radius = self._get_radius()
        moving: list[tuple[Tensor, float]] = []  # parameters with a gradient, and their learning rates
        resting: list[Tensor] = []  # offsets from the center of the parameters without a gradient
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if group["center"] is not None and "center" not in state:
                    state["center"] = parameter.detach().clone()
                if parameter.grad is None:
                    resting.append(parameter - state["center"] if "center" in state else parameter)
                else:
                    if "sum" not in state:
                        state["sum"] = torch.full_like(parameter, group["eps"] ** 2)
                    moving.append((parameter, float(group["lr"])))
        if moving:
            self._step_within(_shrink_radius(radius, _norm(resting), moving[0][0].dtype), moving)
        return loss

    def _step_within(self, radius: float, moving: Sequence[tuple[Tensor, float]]) -> None:
        """Take an Adagrad step, then project onto the ball in the metric of this step."""
        metric = []
        for parameter, lr in moving:
            gradient = parameter.grad
            assert gradient is not None
            root = self.state[parameter]["sum"].addcmul_(gradient, gradient).sqrt()
            parameter.addcdiv_(gradient, root, value=-lr)
            metric.append(root)
        parameters = [parameter for parameter, _ in moving]
        centers = [self.state[parameter].get("center") for parameter in parameters]
        projected, multiplier = project_onto_ball(parameters, metric, radius, centers)
        if multiplier > 0:
            for parameter, point in zip(parameters, projected, strict=True):
                parameter.copy_(point)

    def _get_radius(self) -> float:
        radii = {float(group["radius"]) for group in self.param_groups}
        if len(radii) > 1:
            raise ValueError(
                f"Invalid radius value: {sorted(radii)}. Must be the same in all groups: they share a ball."
            )
        return radii.pop()


def project_onto_ball(
    points: Sequence[Tensor], metric: Sequence[Tensor], radius: float, centers: Sequence[Tensor | None] | None = None
) -> tuple[list[Tensor], float]:
    r"""Project onto a ball in a diagonal metric, with several tensors as one vector.

    The minimiser of :math:`\langle x - w, H (x - w) \rangle` over :math:`\|x - c\| \le r` is
    :math:`x = c + H (H + \mu)^{-1} (w - c)`, where :math:`\mu \ge 0` is the root of :math:`\|x(\mu) - c\| = r`. It lies
    between :math:`h (\|w - c\| / r - 1)` for the smallest and the largest entry h of H. Newton's method on
    :math:`1/r - 1/\|x(\mu) - c\|`, which is nearly linear, finds it in a few steps; a step that would leave the bracket
    is replaced by the geometric mean of its ends.

    Args:
        points: w.
        metric: the diagonal of H, positive, one tensor per point.
        radius: r.
        centers: c; None is the origin.

    Returns:
        x, and the multiplier :math:`\mu`, which is 0 if w is inside.

    Example:
        >>> (x,), multiplier = project_onto_ball([torch.tensor([3.0, 4.0])], [torch.ones(2)], 1.0)
        >>> torch.allclose(x, torch.tensor([0.6, 0.8])), round(multiplier, 5)
        (True, 4.0)
    """
    centers = [None] * len(points) if centers is None else centers
    offsets = [point if c is None else point - c for point, c in zip(points, centers, strict=True)]
    length = _norm(offsets)
    if length <= radius or not math.isfinite(length):  # leave nonfinite values for the caller to see
        return list(points), 0.0
    dtypes = [torch.promote_types(offset.dtype, torch.float32) for offset in offsets]
    offsets = [offset.to(dtype) for offset, dtype in zip(offsets, dtypes, strict=True)]
    metric = [part.to(dtype) for part, dtype in zip(metric, dtypes, strict=True)]
    multiplier = _find_multiplier(offsets, metric, radius, length)
    shrunk = _shrink(offsets, metric, multiplier)
    projected = [
        (offset if c is None else offset + c).to(point.dtype)
        for point, offset, c in zip(points, shrunk, centers, strict=True)
    ]
    return projected, multiplier


def _find_multiplier(offsets: list[Tensor], metric: list[Tensor], radius: float, length: float) -> float:
    if radius == 0:
        return math.inf
    rounding = 4 * max(torch.finfo(offset.dtype).eps for offset in offsets)
    nonempty = [part for part in metric if part.numel()]
    low = min(float(part.min()) for part in nonempty) * (length - radius) / radius
    high = max(float(part.max()) for part in nonempty) * (length - radius) / radius
    multiplier = low
    for _ in range(200):
        shrunk = _shrink(offsets, metric, multiplier)
        norm = _norm(shrunk)
        low, high = (multiplier, high) if norm > radius else (low, multiplier)
        if abs(norm - radius) <= rounding / 4 * radius or high - low <= rounding * low:
            break
        slope = _norm([x / (h + multiplier).sqrt() for x, h in zip(shrunk, metric, strict=True)])
        newton = multiplier + (norm / slope) ** 2 * (norm - radius) / radius
        multiplier = newton if low < newton < high else math.sqrt(low) * math.sqrt(high)
    return multiplier


def _shrink(offsets: list[Tensor], metric: list[Tensor], multiplier: float) -> list[Tensor]:
    return [offset * (h / (h + multiplier)) for offset, h in zip(offsets, metric, strict=True)]


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of all entries together, summed in at least single precision."""
    norms = [float(torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))) for t in tensors]
    return math.hypot(*norms)


def _shrink_radius(radius: float, resting: float, dtype: torch.dtype) -> float:
    """Return the radius that the resting parameters leave to the moving ones."""
    if resting > radius * (1 + 8 * torch.finfo(dtype).eps):
        raise ValueError(
            f"The parameters without a gradient are {resting:.6g} from the center, outside the ball of radius "
            f"{radius:.6g}, and cannot be moved. Use a larger radius, or start inside the ball."
        )
    return math.sqrt(max((radius - resting) * (radius + resting), 0.0)) if resting else radius
