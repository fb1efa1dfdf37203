"""Distributions rho: where parameter points are drawn."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from egop.estimation.initializers import draw_initializations, find_initializer, stack_points, warn_of_scale
from egop.estimation.objective import Objective, sampling_lock
from egop.numerics import check_nonnegative


class Distribution(abc.ABC):
    """A distribution over points in parameter space.

    A subclass implements :meth:`draw`, and :meth:`draw_many` if that is faster.

    Example:
        >>> class Corners(egop.Distribution):  # of a cube
        ...     def draw(self, objective, generator):
        ...         signs = lambda like: torch.randint(0, 2, like.shape, generator=generator) - 0.5
        ...         return {name: signs(value) for name, value in objective.parameters.items()}
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.zeros(3)})
        >>> basis = egop.estimate(objective, rho=Corners(), progress=False)
    """

    @abc.abstractmethod
    def draw(self, objective: Objective, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw one point: a value for each of the objective's parameters, using only ``generator``."""

    def draw_many(self, objective: Objective, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        """Draw points, stacked along a new first dimension."""
        return stack_points([self.draw(objective, generator) for _ in range(count)])

    def check(self, objective: Objective) -> None:  # noqa: B027 - most distributions fit every objective
        """Raise an error if this distribution does not fit the objective."""


class _BatchedDistribution(Distribution):
    """A distribution that draws many points at once."""

    def draw(self, objective: Objective, generator: torch.Generator) -> dict[str, Tensor]:
        return {name: value[0] for name, value in self.draw_many(objective, generator, 1).items()}

    @abc.abstractmethod
    def draw_many(self, objective: Objective, generator: torch.Generator, count: int) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Gaussian(_BatchedDistribution):
    """A normal distribution with independent entries, ``N(center, scale**2)``.

    Args:
        scale: the standard deviation.
        center: a tensor for each parameter name; the origin by default.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.zeros(3)})
        >>> rho = egop.Gaussian(0.1, center={"theta": torch.ones(3)})
        >>> basis = egop.estimate(objective, rho=rho, samples=100, progress=False)
        >>> round(basis.spectrum["theta"].stable_rank, 1)  # near the center all gradients are similar
        1.1
    """

    scale: float = 1.0
    center: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"Invalid scale value: {self.scale}. Must be a positive number.")

    def check(self, objective: Objective) -> None:
        _check_center(self.center, objective)

    def draw_many(self, objective: Objective, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        noise = _draw_normal(objective, generator, count)
        return _add_center(self.center, {name: value.mul_(self.scale) for name, value in noise.items()})


@dataclass(frozen=True)
class Ball(_BatchedDistribution):
    """A uniform distribution over a ball in parameter space, as in the paper's theory.

    Args:
        radius: the ball's radius, over all parameters together.
        center: a tensor for each parameter name; the origin by default.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.zeros(3)})
        >>> point = egop.Ball(radius=2.0).draw(objective, torch.Generator().manual_seed(0))
        >>> bool(point["theta"].norm() <= 2)
        True
    """

    radius: float
    center: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.radius < math.inf:
            raise ValueError(f"Invalid radius value: {self.radius}. Must be a positive number.")

    def check(self, objective: Objective) -> None:
        _check_center(self.center, objective)

    def draw_many(self, objective: Objective, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        noise = _draw_normal(objective, generator, count)
        dimension = sum(value[0].numel() for value in noise.values())
        squares = torch.stack([value.double().square().reshape(count, -1).sum(1) for value in noise.values()])
        uniform = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
        lengths = self.radius * uniform.to(squares) ** (1 / dimension) / squares.sum(0).sqrt()
        scaled = {
            name: (lengths.reshape(-1, *[1] * (value.dim() - 1)) * value).to(value) for name, value in noise.items()
        }
        return _add_center(self.center, scaled)


@dataclass(frozen=True)
class Initialization(_BatchedDistribution):
    """The distribution of the network's own initialization.

    Args:
        init_fn: ``init_fn(model)`` initializes the model in place with torch's global random state (which is seeded for
            each draw and restored afterwards). By default the model's own initializers are called: every layer's
            ``reset_parameters()``, then what its author wrote, such as ``_init_weights`` in transformers. Parameters
            that none of them writes keep their values. A log line names weights drawn at a different scale than the
            model's.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [torch.ones(8, 4)])
        >>> rho = egop.Initialization(lambda model: torch.nn.init.orthogonal_(model.weight))
        >>> basis = egop.estimate(objective, rho=rho, structure=egop.Full(), progress=False)
    """

    init_fn: Callable[[nn.Module], object] | None = None

    def check(self, objective: Objective) -> None:
        if objective.module is None:
            raise TypeError(
                "egop.Initialization() needs a module to initialize, but the objective was built from a function. "
                "Use rho=egop.Gaussian(scale) or egop.Ball(radius)."
            )
        if self.init_fn is None:
            warn_of_scale(objective, self._find_initializer(objective))

    def draw_many(self, objective: Objective, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        return draw_initializations(objective, self._find_initializer(objective), generator, count)

    def _find_initializer(self, objective: Objective) -> Callable[[nn.Module], object]:
        assert objective.module is not None, "check() was not called"
        with sampling_lock:  # while another thread samples, torch.func may have swapped the parameters
            initializer = self.init_fn or find_initializer(objective.module)
        if initializer is None:
            raise ValueError(
                f"No submodule of {type(objective.module).__name__} has a reset_parameters() method, or one like "
                "_init_weights(), to draw an initialization with. Pass one: egop.Initialization(init_fn=...), or use "
                "egop.Gaussian(scale)."
            )
        return initializer


@dataclass(frozen=True)
class Recentered(_BatchedDistribution):
    """Normal noise around the current parameters, for refreshing a basis during training.

    Args:
        scale: the standard deviation of the noise added to each entry. With 0, all samples are taken at the current
            point and differ only in their batches and dropout masks.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.ones(3)})
        >>> basis = egop.estimate(objective, rho=egop.Recentered(0.1), samples=100, progress=False)
    """

    scale: float = 0.0

    def __post_init__(self) -> None:
        check_nonnegative("scale", self.scale)

    def draw_many(self, objective: Objective, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        if self.scale == 0:
            return {name: value.expand(count, *value.shape).clone() for name, value in objective.current.items()}
        noise = _draw_normal(objective, generator, count)
        return {name: noise[name].mul_(self.scale).add_(value) for name, value in objective.current.items()}


def _draw_normal(objective: Objective, generator: torch.Generator, count: int) -> dict[str, Tensor]:
    def draw(parameter: Tensor) -> Tensor:
        dtype = torch.promote_types(parameter.dtype, torch.float32)  # half precision has too few distinct values
        shape = (count, *parameter.shape)
        return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype).to(parameter)

    return {name: draw(parameter) for name, parameter in objective.parameters.items()}


def _add_center(center: Mapping[str, Tensor] | None, offsets: dict[str, Tensor]) -> dict[str, Tensor]:
    if center is None:
        return offsets
    return {name: offset + center[name].detach().to(offset) for name, offset in offsets.items()}


def _check_center(center: Mapping[str, Tensor] | None, objective: Objective) -> None:
    if center is None:
        return
    if missing := [name for name in objective.parameters if name not in center]:
        raise ValueError(f"The center has no value for the parameters {missing}; it has {sorted(center)}.")
    for name, parameter in objective.parameters.items():
        if center[name].shape != parameter.shape:
            raise ValueError(
                f"The center of '{name}' has shape {tuple(center[name].shape)}, the parameter {tuple(parameter.shape)}."
            )
