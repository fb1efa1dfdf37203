"""rho: where parameter points are drawn."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from egop.estimation.initialisers import Drawer, Initialiser, own_initialiser, repeated
from egop.estimation.keeping import one_at_a_time
from egop.estimation.objective import Objective


class Distribution(abc.ABC):
    """A distribution of parameter points. A subclass writes :meth:`draw`, and :meth:`drawer` where that is faster.

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
        """One point: a value for each of the objective's parameters, drawn from ``generator`` alone."""

    def drawer(self, objective: Objective) -> Drawer | None:
        """What draws many points at a time, where that is faster than :meth:`draw`."""
        return None

    def check(self, objective: Objective) -> None:  # noqa: B027 - most distributions fit every objective
        """Raise an error that says what is wrong when this distribution does not fit the objective."""


@dataclass(frozen=True)
class Gaussian(Distribution):
    """Independent normal entries, ``N(center, scale**2)``.

    Args:
        scale: the standard deviation.
        center: a tensor for each parameter name; the origin by default.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.zeros(3)})
        >>> rho = egop.Gaussian(0.1, center={"theta": torch.ones(3)})
        >>> basis = egop.estimate(objective, rho=rho, samples=100, progress=False)
        >>> round(basis.spectrum["theta"].stable_rank, 1)  # near the center all gradients are alike
        1.1
    """

    scale: float = 1.0
    center: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"Invalid scale value: {self.scale}. Must be a positive number.")

    def check(self, objective: Objective) -> None:
        _check_center(self.center, objective)

    def draw(self, objective: Objective, generator: torch.Generator) -> dict[str, Tensor]:
        return _first(self.drawer(objective)(generator, 1))

    def drawer(self, objective: Objective) -> Drawer:
        return partial(self._draw, objective)

    def _draw(self, objective: Objective, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        noise = _standard_normal(objective, generator, count)
        return _around(self.center, {name: value.mul_(self.scale) for name, value in noise.items()})


@dataclass(frozen=True)
class Ball(Distribution):
    """Uniform in a ball of the whole parameter space: the bounded, isotropic distribution of the paper's theory.

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

    def draw(self, objective: Objective, generator: torch.Generator) -> dict[str, Tensor]:
        return _first(self.drawer(objective)(generator, 1))

    def drawer(self, objective: Objective) -> Drawer:
        return partial(self._draw, objective)

    def _draw(self, objective: Objective, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        noise = _standard_normal(objective, generator, count)
        dimension = sum(value[0].numel() for value in noise.values())
        squares = torch.stack([value.double().square().reshape(count, -1).sum(1) for value in noise.values()])
        uniform = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
        lengths = self.radius * uniform.to(squares) ** (1 / dimension) / squares.sum(0).sqrt()
        scaled = {
            name: (lengths.reshape(-1, *[1] * (value.dim() - 1)) * value).to(value) for name, value in noise.items()
        }
        return _around(self.center, scaled)


@dataclass(frozen=True)
class Initialization(Distribution):
    """The distribution in which the network itself is initialised.

    Args:
        init_fn: ``init_fn(model)`` initialises the model in place, drawing from torch's global random state (which is
            seeded for each draw and put back afterwards). By default the model's own initialisers are called: every
            layer's ``reset_parameters()``, then what its author wrote, such as transformers' ``_init_weights``. What
            none of them writes stays where it is; a log line says so, and also where what they draw has another scale
            than the model has.

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
                "egop.Initialization() needs a module to initialise, but the objective was made from a function. "
                "Use rho=egop.Gaussian(scale) or egop.Ball(radius)."
            )
        if self.init_fn is None:
            self._initialiser(objective).try_out()

    def draw(self, objective: Objective, generator: torch.Generator) -> dict[str, Tensor]:
        return _first(self.drawer(objective)(generator, 1))

    def drawer(self, objective: Objective) -> Drawer:
        return self._initialiser(objective).draw

    def _initialiser(self, objective: Objective) -> Initialiser:
        assert objective.module is not None, "check() was not called"
        with one_at_a_time:  # while another thread samples, values may stand in the parameters' places
            function = self.init_fn or own_initialiser(objective.module)
        if function is None:
            raise ValueError(
                f"No submodule of {type(objective.module).__name__} has a reset_parameters() method, or one like "
                "_init_weights(), to draw an initialisation with. Give one: egop.Initialization(init_fn=...), or use "
                "egop.Gaussian(scale)."
            )
        return Initialiser(objective, function)


@dataclass(frozen=True)
class Recentered(Distribution):
    """Around the current parameters, wherever training has brought them: for renewing a basis.

    Args:
        scale: the standard deviation of the noise added to each entry; 0 stays at the current point, so that the
            samples differ by their mini-batches (and dropout masks) only.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.ones(3)})
        >>> basis = egop.estimate(objective, rho=egop.Recentered(0.1), samples=100, progress=False)
    """

    scale: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.scale < math.inf:
            raise ValueError(f"Invalid scale value: {self.scale}. Must be zero or a positive number.")

    def draw(self, objective: Objective, generator: torch.Generator) -> dict[str, Tensor]:
        return _first(self.drawer(objective)(generator, 1))

    def drawer(self, objective: Objective) -> Drawer:
        return partial(self._draw, objective)

    def _draw(self, objective: Objective, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        if self.scale == 0:
            return repeated(objective.current, count)
        noise = _standard_normal(objective, generator, count)
        return {name: noise[name].mul_(self.scale).add_(value) for name, value in objective.current.items()}


def _first(points: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[0] for name, value in points.items()}


def _standard_normal(objective: Objective, generator: torch.Generator, count: int) -> dict[str, Tensor]:
    def draw(parameter: Tensor) -> Tensor:
        dtype = torch.promote_types(parameter.dtype, torch.float32)  # half precision has too few distinct draws
        shape = (count, *parameter.shape)
        return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype).to(parameter)

    return {name: draw(parameter) for name, parameter in objective.parameters.items()}


def _around(center: Mapping[str, Tensor] | None, offsets: dict[str, Tensor]) -> dict[str, Tensor]:
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
