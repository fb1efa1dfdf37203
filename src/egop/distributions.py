"""rho: where parameter points are drawn."""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from egop.objective import Objective, seed_everything

logger = logging.getLogger("egop")


class Distribution(abc.ABC):
    """A distribution of parameter points. A subclass writes :meth:`draw`."""

    @abc.abstractmethod
    def draw(self, objective: Objective, generator: torch.Generator) -> dict[str, Tensor]:
        """One point: a value for each of the objective's parameters, drawn from ``generator`` alone."""

    def check(self, objective: Objective) -> None:  # noqa: B027 - most distributions fit every objective
        """Raise an error that says what is wrong when this distribution does not fit the objective."""


@dataclass(frozen=True)
class Gaussian(Distribution):
    """Independent normal entries, ``N(center, scale**2)``.

    Args:
        scale: the standard deviation.
        center: a tensor for each parameter name; the origin by default.
    """

    scale: float = 1.0
    center: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"Invalid scale value: {self.scale}. Must be a positive number.")

    def check(self, objective: Objective) -> None:
        _check_center(self.center, objective)

    def draw(self, objective: Objective, generator: torch.Generator) -> dict[str, Tensor]:
        noise = _standard_normal(objective, generator)
        return _around(self.center, {name: self.scale * value for name, value in noise.items()})


@dataclass(frozen=True)
class Ball(Distribution):
    """Uniform in a ball of the whole parameter space: the bounded, isotropic distribution of the paper's theory.

    Args:
        radius: the ball's radius, over all parameters together.
        center: a tensor for each parameter name; the origin by default.
    """

    radius: float
    center: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.radius < math.inf:
            raise ValueError(f"Invalid radius value: {self.radius}. Must be a positive number.")

    def check(self, objective: Objective) -> None:
        _check_center(self.center, objective)

    def draw(self, objective: Objective, generator: torch.Generator) -> dict[str, Tensor]:
        noise = _standard_normal(objective, generator)
        dimension = sum(value.numel() for value in noise.values())
        norm = math.sqrt(sum(value.double().square().sum().item() for value in noise.values()))
        uniform = torch.rand((), generator=generator, device=generator.device, dtype=torch.float64).item()
        length = self.radius * uniform ** (1 / dimension) / norm
        return _around(self.center, {name: length * value for name, value in noise.items()})


@dataclass(frozen=True)
class Initialization(Distribution):
    """The distribution in which the network itself is initialised.

    Args:
        init_fn: ``init_fn(model)`` initialises the model in place, drawing from torch's global random state (which is
            seeded for each draw and put back afterwards). By default every submodule's own ``reset_parameters()``
            is called; a parameter whose module has none stays where it is, and a log line says so.
    """

    init_fn: Callable[[nn.Module], object] | None = None

    def check(self, objective: Objective) -> None:
        if objective.module is None:
            raise TypeError(
                "egop.Initialization() needs a module to initialise, but the objective was made from a function. "
                "Use rho=egop.Gaussian(scale) or egop.Ball(radius)."
            )
        if self.init_fn is not None:
            return
        drawn = {id(own) for part, _ in _initialisers(objective.module) for own in part.parameters(recurse=False)}
        left = [name for name, parameter in objective.parameters.items() if id(parameter) not in drawn]
        if len(left) == len(objective.parameters):
            raise ValueError(
                f"No submodule of {type(objective.module).__name__} has a reset_parameters() method to draw an "
                "initialisation with. Give one: egop.Initialization(init_fn=...), or use egop.Gaussian(scale)."
            )
        if left:
            logger.warning(
                "egop.Initialization() leaves %s where they are: their modules have no reset_parameters(). "
                "Pass init_fn=... to draw them too.",
                ", ".join(f"'{name}'" for name in left),
            )

    def draw(self, objective: Objective, generator: torch.Generator) -> dict[str, Tensor]:
        module = objective.module
        assert module is not None, "check() was not called"
        seed = torch.randint(2**62, (), generator=generator, device=generator.device).item()
        with objective.preserved(), torch.no_grad():
            objective.write(objective.current)  # what has no initialiser stays where training stands
            seed_everything(int(seed))
            if self.init_fn is not None:
                self.init_fn(module)
            else:
                for _, reset in _initialisers(module):
                    reset()
            return {name: parameter.detach().clone() for name, parameter in objective.parameters.items()}


@dataclass(frozen=True)
class Recentered(Distribution):
    """Around the current parameters, wherever training has brought them: for renewing a basis.

    Args:
        scale: the standard deviation of the noise added to each entry; 0 stays at the current point, so that the
            samples differ by their mini-batches (and dropout masks) only.
    """

    scale: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.scale < math.inf:
            raise ValueError(f"Invalid scale value: {self.scale}. Must be zero or a positive number.")

    def draw(self, objective: Objective, generator: torch.Generator) -> dict[str, Tensor]:
        if self.scale == 0:
            return {name: value.clone() for name, value in objective.current.items()}
        noise = _standard_normal(objective, generator)
        return {name: value + self.scale * noise[name] for name, value in objective.current.items()}


def _standard_normal(objective: Objective, generator: torch.Generator) -> dict[str, Tensor]:
    def draw(parameter: Tensor) -> Tensor:
        dtype = torch.promote_types(parameter.dtype, torch.float32)  # half precision has too few distinct draws
        return torch.randn(parameter.shape, generator=generator, device=generator.device, dtype=dtype).to(parameter)

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


def _initialisers(module: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    """The parts of a module that can initialise themselves; inner ones first, the order in which a module is built."""
    for child in module.children():
        yield from _initialisers(child)
    # MultiheadAttention and Transformer spell it with an underscore; a test notices should torch rename it.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        yield module, reset
