"""BallConstrainedAdagrad: Adagrad that stays in a ball, the optimizer that the paper's guarantees are about."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

GIVEN = "given"  # what a group's center says when the tensors themselves are in the state


class BallConstrainedAdagrad(Optimizer):
    r"""Adagrad projected onto a ball in its own metric.

    .. math::
        H_t = \mathrm{diag}\Big(\varepsilon^2 I + \sum_{j \le t} g_j g_j^\top\Big)^{1/2}, \qquad
        \theta_{t+1} = \Pi_\Theta^{H_t} \big( \theta_t - \eta H_t^{-1} g_t \big), \qquad
        \Theta = \{ \theta : \|\theta - \theta_c\|_2 \le r \}

    where :math:`\Pi_\Theta^H(w) = \arg\min_{\theta \in \Theta} \langle \theta - w, H (\theta - w) \rangle`. As long as
    the steps stay inside, this is ``torch.optim.Adagrad`` with ``initial_accumulator_value=eps**2, eps=0``.

    There is **one ball for all parameters** of the optimizer together, however many tensors and groups they are: the
    paper's :math:`\theta` is the vector of all of them. Groups may differ in ``lr``, ``eps`` and ``center``, but not in
    ``radius``. A parameter that has no gradient is not moved; the others are projected onto the part of the ball that
    it leaves them. A start outside the ball is allowed, the first step ends inside.

    In :class:`egop.ReparameterizedOptimizer` the same ball is meant: an orthonormal change of basis keeps distances, so
    the ball of coordinates decodes to the ball of parameters (with ``Auxiliary``, which has more coordinates than
    parameters, to a part of it). The center has to be one that the optimizer can find in coordinates: ``None`` or
    ``"start"``.

    Args:
        params: parameters, named parameters, or groups of them.
        lr: the step size :math:`\eta`.
        radius: r, of the ball; infinity for none.
        center: :math:`\theta_c`: ``None`` for the origin, ``"start"`` for where the parameters are at the first step,
            or one tensor per parameter, in their order. A group may have its own.
        eps: :math:`\varepsilon`, inside the root as the paper has it.

    Example:
        >>> theta = torch.tensor([3.0, 0.5], requires_grad=True)
        >>> optimizer = egop.BallConstrainedAdagrad([theta], lr=0.1, radius=1.0)
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     (theta - torch.tensor([2.0, 0.0])).square().sum().backward()
        ...     _ = optimizer.step()
        >>> round(theta.norm().item(), 4)  # the point of the ball that is nearest to (2, 0)
        1.0

    Reference: *Faster Adaptive Optimization via Expected Gradient Outer Product Reparameterization*, Algorithm 2 and
    Theorem 1; its right-hand side is :func:`egop.theory.regret_bound`.
    """

    _unclaimed: list[Tensor] | None = None  # explicit centers, while the constructor deals them out to the groups

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        radius: float = 1.0,
        center: str | Sequence[Tensor] | None = None,
        eps: float = 1e-10,
    ) -> None:
        explicit = None if center is None or isinstance(center, str) else list(center)
        self._unclaimed = explicit
        setting = center if explicit is None else GIVEN
        super().__init__(params, {"lr": lr, "radius": radius, "center": setting, "eps": eps})
        _check_all_claimed(explicit)
        self._unclaimed = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to those that share the ball; it may have its own ``lr``, ``eps``, ``center``."""
        _check_hyperparameters({**self.defaults, **param_group})
        center = param_group.get("center")
        centers = None if center is None or isinstance(center, str) else list(center)
        super().add_param_group(param_group if centers is None else {**param_group, "center": GIVEN})
        group = self.param_groups[-1]
        try:
            self._radius()
            for parameter in group["params"]:
                _check_parameter(parameter, group["eps"])
                if group["center"] == GIVEN:
                    self.state[parameter]["center"] = _claim(self._unclaimed if centers is None else centers, parameter)
            _check_all_claimed(centers)
        except Exception:
            for parameter in self.param_groups.pop()["params"]:
                self.state.pop(parameter, None)
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        radius = self._radius()
        moving: list[Moving] = []
        resting: list[Tensor] = []  # how far from the center the parameters without a gradient are
        for group in self.param_groups:
            for parameter in group["params"]:
                center = self._center(parameter, group)
                if parameter.grad is None:
                    resting.append(parameter if center is None else parameter - center)
                elif parameter.grad.layout is not torch.strided:
                    raise TypeError("BallConstrainedAdagrad does not support sparse gradients.")
                else:
                    moving.append(Moving(parameter, self._squares(parameter, group), center, float(group["lr"])))
        if moving:
            ball_constrained_adagrad(moving, _room(radius, _norm(resting), moving[0].parameter.dtype))
        return loss

    def _radius(self) -> float:
        radii = {float(group["radius"]) for group in self.param_groups}
        if len(radii) > 1:
            raise ValueError(
                f"Invalid radius value: {sorted(radii)}. Must be the same in all groups: they share a ball."
            )
        return radii.pop()

    def _center(self, parameter: Tensor, group: dict[str, Any]) -> Tensor | None:
        if group["center"] is None:
            return None
        state = self.state[parameter]
        if "center" not in state:
            if group["center"] == GIVEN:
                raise RuntimeError("The state has lost the center that was given; make a new optimizer with it.")
            state["center"] = parameter.detach().clone()
        center: Tensor = state["center"]
        return center

    def _squares(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        if "sum" not in state:
            state["sum"] = torch.full_like(parameter, group["eps"] ** 2)
        squares: Tensor = state["sum"]
        return squares


class Moving(NamedTuple):
    """A parameter with a gradient, and what a step needs to know of it."""

    parameter: Tensor
    squares: Tensor
    center: Tensor | None
    lr: float


def ball_constrained_adagrad(moving: Sequence[Moving], radius: float) -> None:
    """One step in place: Adagrad, then back to the ball in the metric of this step."""
    metric = []
    for parameter, squares, _, lr in moving:
        gradient = parameter.grad
        assert gradient is not None
        root = squares.addcmul_(gradient, gradient).sqrt()
        parameter.addcdiv_(gradient, root, value=-lr)
        metric.append(root)
    parameters = [item.parameter for item in moving]
    projected, multiplier = project_onto_ball(parameters, metric, radius, [item.center for item in moving])
    if multiplier > 0:
        for parameter, point in zip(parameters, projected, strict=True):
            parameter.copy_(point)


def project_onto_ball(
    points: Sequence[Tensor], metric: Sequence[Tensor], radius: float, centers: Sequence[Tensor | None] | None = None
) -> tuple[list[Tensor], float]:
    r"""The point of a ball that is nearest in a diagonal metric, over several tensors as one vector.

    The minimiser of :math:`\langle x - w, H (x - w) \rangle` over :math:`\|x - c\| \le r` is
    :math:`x = c + H (H + \mu)^{-1} (w - c)`, where :math:`\mu \ge 0` is the root of :math:`\|x(\mu) - c\| = r`. It lies
    between :math:`h (\|w - c\| / r - 1)` for the smallest and the largest entry h of H. There, Newton's method on
    :math:`1/r - 1/\|x(\mu) - c\|`, which is nearly straight, finds it in a few steps; one that would leave the bracket
    is replaced by its geometric middle.

    Args:
        points: w.
        metric: the diagonal of H, positive, a tensor for each of the points.
        radius: r.
        centers: c; a missing one is the origin.

    Returns:
        x, and the multiplier :math:`\mu`, which is 0 when w is inside.

    Example:
        >>> from egop.extras.constrained import project_onto_ball
        >>> (x,), multiplier = project_onto_ball([torch.tensor([3.0, 4.0])], [torch.ones(2)], 1.0)
        >>> torch.allclose(x, torch.tensor([0.6, 0.8])), round(multiplier, 5)
        (True, 4.0)
    """
    centers = [None] * len(points) if centers is None else centers
    offsets = [point if c is None else point - c for point, c in zip(points, centers, strict=True)]
    length = _norm(offsets)
    if length <= radius or not math.isfinite(length):  # what is not finite is left for its owner to see
        return list(points), 0.0
    precision = [torch.promote_types(offset.dtype, torch.float32) for offset in offsets]
    offsets = [offset.to(dtype) for offset, dtype in zip(offsets, precision, strict=True)]
    metric = [part.to(dtype) for part, dtype in zip(metric, precision, strict=True)]
    multiplier = _multiplier(offsets, metric, radius, length)
    shrunk = _shrunk(offsets, metric, multiplier)
    moved = [
        (offset if c is None else offset + c).to(point.dtype)
        for point, offset, c in zip(points, shrunk, centers, strict=True)
    ]
    return moved, multiplier


def _multiplier(offsets: list[Tensor], metric: list[Tensor], radius: float, length: float) -> float:
    if radius == 0:
        return math.inf
    rounding = 4 * max(torch.finfo(offset.dtype).eps for offset in offsets)
    filled = [part for part in metric if part.numel()]
    low = min(float(part.min()) for part in filled) * (length - radius) / radius
    high = max(float(part.max()) for part in filled) * (length - radius) / radius
    multiplier = low
    for _ in range(200):
        shrunk = _shrunk(offsets, metric, multiplier)
        norm = _norm(shrunk)
        low, high = (multiplier, high) if norm > radius else (low, multiplier)
        if abs(norm - radius) <= rounding / 4 * radius or high - low <= rounding * low:
            break
        slope = _norm([x / (h + multiplier).sqrt() for x, h in zip(shrunk, metric, strict=True)])
        newton = multiplier + (norm / slope) ** 2 * (norm - radius) / radius
        multiplier = newton if low < newton < high else math.sqrt(low) * math.sqrt(high)
    return multiplier


def _shrunk(offsets: list[Tensor], metric: list[Tensor], multiplier: float) -> list[Tensor]:
    return [offset * (h / (h + multiplier)) for offset, h in zip(offsets, metric, strict=True)]


def _norm(tensors: Sequence[Tensor]) -> float:
    """The Euclidean norm of all entries together, added up in at least single precision."""
    norms = [float(torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))) for t in tensors]
    return math.hypot(*norms)


def _room(radius: float, resting: float, dtype: torch.dtype) -> float:
    """The radius of the part of the ball that is left to the parameters that move."""
    if resting > radius * (1 + 8 * torch.finfo(dtype).eps):
        raise ValueError(
            f"The parameters that have no gradient are {resting:.6g} from the center, outside the ball of radius "
            f"{radius:.6g}, and cannot be moved. Use a larger radius, or start inside the ball."
        )
    return math.sqrt(max((radius - resting) * (radius + resting), 0.0)) if resting else radius


def _check_hyperparameters(group: dict[str, Any]) -> None:
    for name in ("lr", "radius", "eps"):
        kinds = (int, float, Tensor) if name == "lr" else (int, float)
        if isinstance(group[name], bool) or not isinstance(group[name], kinds):
            raise TypeError(f"Invalid {name} value: {group[name]!r}. Must be a number.")
    if not 0 <= float(group["lr"]) < math.inf:
        raise ValueError(f"Invalid lr value: {group['lr']}. Must be zero or a positive number.")
    if not group["radius"] > 0:
        raise ValueError(f"Invalid radius value: {group['radius']}. Must be positive.")
    if not 0 < group["eps"] < math.inf:
        raise ValueError(f"Invalid eps value: {group['eps']}. Must be a positive number.")
    if isinstance(group["center"], str) and group["center"] not in ("start", GIVEN):
        raise ValueError(_wrong_center(repr(group["center"]), "this is not a setting"))


def _check_parameter(parameter: Tensor, eps: float) -> None:
    if parameter.is_complex():
        raise TypeError("BallConstrainedAdagrad works with real floating-point parameters, got a complex one.")
    if torch.tensor(eps**2, dtype=parameter.dtype, device="cpu") == 0:
        least = math.sqrt(torch.finfo(parameter.dtype).tiny)
        raise ValueError(
            f"Invalid eps value: {eps}. Its square is zero in {parameter.dtype}. Must be at least {least:.1e}."
        )


def _claim(centers: list[Tensor] | None, parameter: Tensor) -> Tensor:
    """The next of the explicit centers, for this parameter."""
    if not centers:
        raise ValueError(_wrong_center("too few tensors", f"a parameter of shape {tuple(parameter.shape)} has none"))
    center = centers.pop(0)
    if not isinstance(center, Tensor) or center.shape != parameter.shape:
        given = f"shape {tuple(center.shape)}" if isinstance(center, Tensor) else repr(center)
        raise ValueError(_wrong_center(given, f"the parameter has shape {tuple(parameter.shape)}"))
    return center.detach().to(parameter, copy=True)


def _check_all_claimed(centers: list[Tensor] | None) -> None:
    if centers:
        raise ValueError(_wrong_center(f"{len(centers)} tensors too many", "every parameter has its own"))


def _wrong_center(given: str, because: str) -> str:
    return (
        f"Invalid center value: {given}, but {because}. Must be None (the origin), 'start', or one tensor per "
        "parameter, in their order; inside egop.ReparameterizedOptimizer None or 'start'."
    )
