"""rho: where parameter points are drawn."""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from egop.objective import Objective
from egop.randomness import drawn_outside_torch, seed_everything

logger = logging.getLogger("egop")

# Draws ``count`` points: for each parameter its values, stacked along a new first dimension.
Drawer = Callable[[torch.Generator, int], dict[str, Tensor]]

# From so many initialisations on, it pays to find out whether they can be drawn all at once.
_WORTH_A_TRIAL = 32


class Distribution(abc.ABC):
    """A distribution of parameter points. A subclass writes :meth:`draw`, and :meth:`drawer` where that is faster."""

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
        return _first(self.drawer(objective)(generator, 1))

    def drawer(self, objective: Objective) -> Drawer:
        return _Initialiser(objective, self.init_fn or _reset).draw


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
        return _first(self.drawer(objective)(generator, 1))

    def drawer(self, objective: Objective) -> Drawer:
        return partial(self._draw, objective)

    def _draw(self, objective: Objective, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        if self.scale == 0:
            return _repeated(objective.current, count)
        noise = _standard_normal(objective, generator, count)
        return {name: noise[name].mul_(self.scale).add_(value) for name, value in objective.current.items()}


class _Initialiser:
    """Draws initialisations of a module: all at once with ``torch.func`` if that is found to do the same.

    A generator that is given must decide everything, so each call seeds the global random numbers, which
    initialisers draw from, by the generator's.
    """

    def __init__(self, objective: Objective, function: Callable[[nn.Module], object]) -> None:
        self.objective, self.function = objective, function
        self.vmaps: bool | None = None  # not known yet

    @torch.no_grad()
    def draw(self, generator: torch.Generator, count: int) -> dict[str, Tensor]:
        """Points from the generator."""
        seeds = torch.randint(2**62, (count,), generator=generator, device=generator.device).tolist()
        with self.objective.preserved():
            if self.vmaps is None and count >= _WORTH_A_TRIAL:
                self.vmaps = self._vmap_does_the_same(seeds[0])
            if self.vmaps and count > 1:
                return self._vmapped(seeds[0], count, "different")
            return stacked([self._one(seed) for seed in seeds])

    def _one(self, seed: int) -> dict[str, Tensor]:
        module = self.objective.module
        assert module is not None, "check() was not called"
        self.objective.write(self.objective.current)  # what has no initialiser stays where training stands
        seed_everything(seed)
        self.function(module)
        return {name: parameter.detach().clone() for name, parameter in self.objective.parameters.items()}

    def _vmapped(self, seed: int, count: int, randomness: str) -> dict[str, Tensor]:
        def initialise(values: dict[str, Tensor]) -> dict[str, Tensor]:
            self.objective.at(values, self.function)
            return values  # written in place

        seed_everything(seed)
        start = _repeated(self.objective.current, count)
        return dict(torch.func.vmap(initialise, randomness=randomness)(start))

    def _vmap_does_the_same(self, seed: int) -> bool:
        """With random numbers that all points share, vmap must give exactly what a single draw gives."""
        plain = self._one(seed)
        if drawn_outside_torch(seed):
            return False
        try:
            shared = self._vmapped(seed, 2, "same")
            self._vmapped(seed, 2, "different")  # which refuses more
        except Exception:  # vmap refuses in many ways; the plain draw has shown that the initialiser is not at fault
            return False
        return all(torch.equal(shared[name], value.expand_as(shared[name])) for name, value in plain.items())


def _reset(module: nn.Module) -> None:
    for _, reset in _initialisers(module):
        reset()


def _first(points: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[0] for name, value in points.items()}


def stacked(points: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """For each parameter its values at the points, along a new first dimension."""
    return {name: torch.stack([point[name] for point in points]) for name in points[0]}


def _repeated(point: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    return {name: value.expand(count, *value.shape).clone() for name, value in point.items()}


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


def _initialisers(module: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    """The parts of a module that can initialise themselves; inner ones first, the order in which a module is built."""
    for child in module.children():
        yield from _initialisers(child)
    # MultiheadAttention and Transformer spell it with an underscore; a test notices should torch rename it.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        yield module, reset
