"""Many runs as one tensor programme: trials and learning rates together, for optimizers that work by coordinates.

All runs of one method are one loop. The parameters of T trials are stacked along a first dimension; each of K learning
rates is a parameter group of its own. In EGOP coordinates the stacked coordinates are decoded by stacked bases, and
reverse mode through that product gives the gradients in coordinates: the literal f∘V, independent of the library's
optimizer.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from egop.reparameterization import Reparameterization

# The paper's four methods, and AdamW.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "SGD": torch.optim.SGD,
    "SGD+momentum": lambda groups, **options: torch.optim.SGD(groups, momentum=0.9, **options),
}

Point = dict[str, Tensor]  # parameters by name, stacked: (trials, rates, *shape)


class Problem(abc.ABC):
    """T trials of one kind of training problem, each with its own data and start."""

    @abc.abstractmethod
    def start(self) -> Point:
        """The starting points, (trials, *shape) each."""

    @abc.abstractmethod
    def losses(self, point: Point, step: int) -> Tensor:
        """The training loss of every run at a step, (trials, rates); all runs of a trial see the same batch."""

    @abc.abstractmethod
    def evaluate(self, point: Point) -> dict[str, Tensor]:
        """What is recorded, (trials, rates) each; called without gradients."""


@dataclass(frozen=True)
class Basis:
    """Stacked changes of basis: for each block the names of its parameters and V, (trials, d, d)."""

    blocks: tuple[tuple[tuple[str, ...], Tensor], ...]

    @classmethod
    def stack(cls, bases: Sequence[Reparameterization]) -> Basis:
        """From one dense basis a trial."""
        return cls(
            tuple(
                (change.block.parameters, torch.stack([basis[name].tensors["basis"] for basis in bases]))
                for name, change in bases[0].items()
            )
        )


def train(
    problem: Problem,
    optimizer: str,
    rates: Sequence[float],
    steps: int,
    *,
    basis: Basis | None = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    record_every: int = 1,
    schedule_every: int | None = None,
    progress: bool = False,
    **options: Any,
) -> tuple[dict[str, Tensor], float]:
    """Train every trial with every learning rate.

    Args:
        problem: the trials.
        optimizer: a name in :data:`OPTIMIZERS`.
        rates: the learning rates.
        steps: how many steps.
        basis: EGOP coordinates; original ones by default.
        schedule: makes a learning-rate scheduler of the optimizer.
        record_every: evaluate after so many steps (and before the first).
        schedule_every: step the scheduler after so many steps; ``record_every`` by default.
        progress: show a progress bar.
        **options: further hyper-parameters of the optimizer.

    Returns:
        What ``problem.evaluate`` gave, (trials, rates, records) each, and the seconds of all steps together.
    """
    coordinates = _Coordinates(problem.start(), basis, len(rates))
    groups = [{"params": tensors, "lr": rate} for tensors, rate in zip(coordinates.leaves, rates, strict=True)]
    stepper = OPTIMIZERS[optimizer](groups, lr=rates[0], **options)
    scheduler = schedule(stepper) if schedule is not None else None
    period = record_every if schedule_every is None else schedule_every
    history = [_evaluated(problem, coordinates)]
    seconds = 0.0
    name = f"{optimizer}{'' if basis is None else ', EGOP'}, {len(rates)} rates"
    with tqdm(total=steps, desc=name, unit="step", disable=not progress) as bar:
        for first in range(0, steps, record_every):
            began = time.perf_counter()
            for step in range(first, min(first + record_every, steps)):
                stepper.zero_grad()
                problem.losses(coordinates.point(), step).sum().backward()
                stepper.step()
                if scheduler is not None and ((step + 1) % period == 0 or step + 1 == steps):
                    scheduler.step()
            history.append(_evaluated(problem, coordinates))  # reads numbers, so all kernels have finished
            seconds += time.perf_counter() - began
            bar.update(min(record_every, steps - first))
    return {key: torch.stack([entry[key] for entry in history], dim=-1).cpu() for key in history[0]}, seconds


class _Coordinates:
    """What is trained: a list of leaf tensors for each learning rate, and the parameters they stand for."""

    def __init__(self, start: Mapping[str, Tensor], basis: Basis | None, rates: int) -> None:
        self._shapes = {name: value.shape[1:] for name, value in start.items()}
        self._blocks = () if basis is None else basis.blocks
        rotated = {name for names, _ in self._blocks for name in names}
        encoded = [
            torch.bmm(torch.cat([start[name].flatten(1) for name in names], dim=1).unsqueeze(1), v).squeeze(1)
            for names, v in self._blocks
        ]
        self._plain = [name for name in start if name not in rotated]
        first = encoded + [start[name] for name in self._plain]
        self.leaves = [[value.detach().clone().requires_grad_() for value in first] for _ in range(rates)]

    def point(self) -> Point:
        """The parameters of all runs, as a differentiable function of the leaves."""
        stacked = [torch.stack(values, dim=1) for values in zip(*self.leaves, strict=True)]
        point: Point = {}
        for (names, v), value in zip(self._blocks, stacked, strict=False):
            parts = torch.bmm(value, v.mT).split([self._shapes[name].numel() for name in names], dim=-1)
            point |= {name: part.unflatten(-1, self._shapes[name]) for name, part in zip(names, parts, strict=True)}
        return point | dict(zip(self._plain, stacked[len(self._blocks) :], strict=True))


@torch.no_grad()
def _evaluated(problem: Problem, coordinates: _Coordinates) -> dict[str, Tensor]:
    return {name: value.float().cpu() if value.dtype != torch.float64 else value.cpu()
            for name, value in problem.evaluate(coordinates.point()).items()}  # fmt: skip
