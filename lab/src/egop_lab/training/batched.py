"""Runs of small problems: all trials and learning rates in one tensor program, for coordinate-wise optimizers.

All runs of one method are one loop. The parameters of T trials with K learning rates each are stacked along two leading
dimensions. In EGOP coordinates the stacked coordinates are decoded by stacked bases, and reverse mode through that
product gives the gradients in coordinates: the literal f∘V, independent of the library's optimizer.

On a GPU such a step is many small kernels, and starting them takes longer than running them. So the step is recorded
once as a CUDA graph and then replayed. Optimizers that couple the entries of a matrix run one by one.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import egop
from egop_lab.builders import Setup
from egop_lab.formatting import pluralize
from egop_lab.methods import SMALL
from egop_lab.models.stacked import Point
from egop_lab.training.loop import pad, run_epochs
from egop_lab.training.updates import OPTIMIZERS, Rule

# Kinds of coordinates; random rotations are a control.
ORIGINAL, EGOP, RANDOM = "original", "EGOP", "random rotation"

_WARM_UP = 2  # steps before the recording, in which libraries set themselves up


class Problem(abc.ABC):
    """T trials of one kind of training problem, each with its own data and start."""

    @abc.abstractmethod
    def start(self) -> Point:
        """Return the starting points, (trials, *shape) each."""

    def batch(self, step: int) -> Any:
        """Return what the loss of a step depends on besides the point: by default the number of the step.

        A tensor (of the rows that make up the batch) says that there is nothing else, so that on a GPU the step can be
        recorded once and replayed with other values in that tensor.
        """
        return step

    @abc.abstractmethod
    def losses(self, point: Point, batch: Any) -> Tensor:
        """Compute the training loss of every run on a batch, (trials, rates); the runs of a trial share it."""

    @abc.abstractmethod
    def evaluate(self, point: Point) -> dict[str, Tensor]:
        """Compute the recorded quantities, (trials, rates) each; called without gradients."""


@dataclass(frozen=True)
class Basis:
    """Stacked changes of basis: for each block the names of its parameters and V, (trials, d, r).

    With fewer columns than rows, these are the paper's auxiliary variables: V has the leading directions, and the rest
    is in original coordinates, or stays as it is where the basis is reduced.
    """

    blocks: tuple[tuple[tuple[str, ...], Tensor], ...]
    reduced: bool = False

    @classmethod
    def stack(cls, bases: Sequence[egop.Basis]) -> Basis:
        """Stack one basis per trial, of ``Full`` blocks and either ``Auxiliary`` or ``Reduced`` ones."""
        kinds = {change.kind for change in bases[0].values()} - {"Full"}
        if kinds not in (set(), {"Auxiliary"}, {"Reduced"}):
            raise ValueError(f"Bases of {' and '.join(sorted(kinds))} blocks cannot be stacked here.")
        return cls(
            tuple(
                (change.block.parameters, torch.stack([basis[name].tensors["basis"] for basis in bases]))
                for name, change in bases[0].items()
            ),
            reduced=kinds == {"Reduced"},
        )


def cosine(periods: int) -> Callable[[int], float]:
    """Return a schedule from one to zero along half a cosine, as ``CosineAnnealingLR``."""
    return lambda done: (1 + math.cos(math.pi * done / periods)) / 2


def train(
    problem: Problem,
    optimizer: str,
    rates: Sequence[float],
    steps: int,
    *,
    weight_decays: Sequence[float] | None = None,
    basis: Basis | None = None,
    schedule: Callable[[int], float] | None = None,
    record_every: int = 1,
    schedule_every: int | None = None,
    progress: bool = False,
    graphs: bool = True,
) -> tuple[dict[str, Tensor], float]:
    """Train every trial with every learning rate, in original coordinates unless there is a basis.

    AdamW decays weights (two or more dimensions) only: by 0.01, unless ``weight_decays`` has a number for each run.
    ``schedule`` returns the factor of all rates after a number of periods of ``schedule_every`` steps, by default
    ``record_every``, the steps between two evaluations (there is one before the first step). ``graphs`` replays
    recorded steps if possible: on a GPU, with batches that are tensors.

    Returns:
        What ``problem.evaluate`` gave, (trials, rates, records) each, and the seconds of all steps together.
    """
    coordinates = Coordinates(problem.start(), basis, len(rates))
    device = coordinates.leaves[0].device
    first = torch.tensor(rates, dtype=torch.float64, device=device)
    decays = first.new_tensor([0.01] * len(rates) if weight_decays is None else weight_decays)
    rule = OPTIMIZERS[optimizer](coordinates.leaves, first.clone(), decays, coordinates.weights)
    period = record_every if schedule_every is None else schedule_every

    def batches(epoch: int) -> Iterator[Any]:
        for step in _list_steps(epoch, record_every, steps):
            if schedule is not None and step % period == 0:
                rule.rates.copy_(first * schedule(step // period))
            yield problem.batch(step)

    curves, seconds = run_epochs(
        _Stepper(problem, coordinates, rule, graphs and device.type == "cuda"),
        batches,
        lambda: _evaluate(problem, coordinates),
        math.ceil(steps / record_every),
        description=f"{optimizer}{'' if basis is None else ', EGOP'}, {pluralize(len(rates), 'rate')}",
        progress=progress,
    )
    return {name: torch.stack(values, dim=-1) for name, values in curves.items()}, seconds


def train_single(
    problem: Problem, name: str, lr: float, steps: int, *, record_every: int = 1, cosine: bool = False
) -> tuple[dict[str, list[float]], float]:
    """Train the only trial of a problem by one of the methods for small problems, which cannot be stacked.

    With ``cosine`` the learning rate is annealed to zero, step by step. ``nan`` fills up a run that diverges.
    """
    start = problem.start()
    leaves = nn.ParameterList(value[0].clone() for value in start.values())
    optimizer = SMALL[name](Setup(model=leaves, options={"lr": lr}, every=1))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if cosine else None

    def get_point() -> Point:
        return {key: leaf[None, None] for key, leaf in zip(start, leaves, strict=True)}

    def take(step: int) -> None:
        optimizer.zero_grad()
        problem.losses(get_point(), problem.batch(step)).sum().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        return {key: value.item() for key, value in problem.evaluate(get_point()).items()}

    epochs = math.ceil(steps / record_every)
    curves, seconds = run_epochs(
        take, lambda epoch: _list_steps(epoch, record_every, steps), evaluate, epochs, progress=False
    )
    return {key: pad(values, epochs) for key, values in curves.items()}, seconds


def _list_steps(epoch: int, every: int, steps: int) -> range:
    return range(epoch * every, min((epoch + 1) * every, steps))


class Coordinates:
    """Trained coordinates, and the parameters that they represent.

    Attributes:
        leaves: (trials, rates, *shape) each.
        weights: for each leaf, whether it has coordinates of weights rather than of biases.
    """

    def __init__(self, start: Mapping[str, Tensor], basis: Basis | None, rates: int) -> None:
        self._shapes = {name: value.shape[1:] for name, value in start.items()}
        self._blocks = () if basis is None else basis.blocks
        rotated = {name for names, _ in self._blocks for name in names}
        self._plain = [name for name in start if name not in rotated]
        first, self.weights = [], []
        self._still: dict[tuple[str, ...], Tensor] = {}
        for names, v in self._blocks:
            vector = torch.cat([start[name].flatten(1) for name in names], dim=1).unsqueeze(1)
            leading = torch.bmm(vector, v)
            parts = [leading]
            if basis is not None and _is_partial(v):
                rest = vector - torch.bmm(leading, v.mT)
                if basis.reduced:
                    self._still[names] = rest.detach()
                else:
                    parts.append(rest)
            first += [part.squeeze(1) for part in parts]
            self.weights += [any(len(self._shapes[name]) > 1 for name in names)] * len(parts)
        first += [start[name] for name in self._plain]
        self.weights += [len(self._shapes[name]) > 1 for name in self._plain]
        self.leaves = [torch.stack([value.detach()] * rates, dim=1).requires_grad_() for value in first]

    def point(self) -> Point:
        """Return the parameters of all runs, as a differentiable function of the leaves."""
        left = iter(self.leaves)
        point: Point = {}
        for names, v in self._blocks:
            leading = next(left)
            if names in self._still:
                vector = self._still[names] + torch.bmm(leading, v.mT)
            elif _is_partial(v):
                rest = next(left)
                vector = rest + torch.bmm(leading - torch.bmm(rest, v), v.mT)
            else:
                vector = torch.bmm(leading, v.mT)
            parts = vector.split([self._shapes[name].numel() for name in names], dim=-1)
            point |= {name: part.unflatten(-1, self._shapes[name]) for name, part in zip(names, parts, strict=True)}
        return point | dict(zip(self._plain, left, strict=True))


class _Stepper:
    """A stepper that takes steps one by one, or replays them from one CUDA graph per batch shape."""

    def __init__(self, problem: Problem, coordinates: Coordinates, rule: Rule, graphs: bool) -> None:
        self._problem, self._coordinates, self._rule, self._graphs = problem, coordinates, rule, graphs
        self._seen: dict[torch.Size, int] = {}
        self._recorded: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, batch: Any) -> None:
        if not (self._graphs and isinstance(batch, Tensor)):
            self._step(batch)
            return
        seen = self._seen[batch.shape] = self._seen.get(batch.shape, 0) + 1
        if seen <= _WARM_UP:
            stream = torch.cuda.Stream()  # a recording does not use the default stream either
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(batch)
            torch.cuda.current_stream().wait_stream(stream)
            return
        if batch.shape not in self._recorded:
            graph, rows = torch.cuda.CUDAGraph(), batch.clone()
            with torch.cuda.graph(graph):
                self._step(rows)
            self._recorded[batch.shape] = graph, rows
        graph, rows = self._recorded[batch.shape]
        rows.copy_(batch)
        graph.replay()

    def _step(self, batch: Any) -> None:
        losses = self._problem.losses(self._coordinates.point(), batch)
        self._rule.step(torch.autograd.grad(losses.sum(), self._coordinates.leaves))


def _is_partial(v: Tensor) -> bool:
    return v.shape[-1] < v.shape[-2]


@torch.no_grad()
def _evaluate(problem: Problem, coordinates: Coordinates) -> dict[str, Tensor]:
    """Evaluate and copy: a recorded quantity may be a view of a trained tensor."""
    values = problem.evaluate(coordinates.point())
    double = torch.float64
    return {
        name: value.to("cpu", double if value.dtype == double else torch.float32, copy=True)
        for name, value in values.items()
    }
