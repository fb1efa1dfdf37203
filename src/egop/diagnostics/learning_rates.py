"""A learning rate for an optimizer, from short runs on copies of the model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from egop.diagnostics.short_runs import (
    Stretches,
    batch_losses,
    check_gradient,
    held_batches,
    mean_loss,
    trained_parameters,
)
from egop.estimation import Objective, checked
from egop.optimizer import ReparameterizedOptimizer
from egop.runs import Panel, Picture, Series, counted, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RATES", "STEPS", "FoundRate", "find_lr"]

STEPS = 50
RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 5e-1)

Make = (
    Callable[[nn.Module], torch.optim.Optimizer]
    | type[torch.optim.Optimizer]
    | tuple[type[torch.optim.Optimizer], Mapping[str, Any]]
)

# A run is a small finished training: the rate rises over this part of it, and falls over that one.
_WARM_UP, _DECAY = 0.1, 0.4
# It is looked at so often at most, over the first so many batches: a look at more than so many times the loss of the
# start ends it.
_LOOKS, _LOOKED_AT, _RUNAWAY = 5, 3, 10.0
# A rate is as good as the best one when its loss is higher by less than these parts: of the lowest loss, and of what
# the best rate gained. The smallest such rate is proposed: where it was wrong, it was less so than the best one.
_OF_LOSS, _OF_GAIN = 0.25, 0.05
# A gain counts when it is more than so many standard errors over the batches.
_ERRORS = 2.0
# So many rates in a row that are no better going up, or not as good going down, end the search in their direction.
_WORSE = 2


@dataclass(frozen=True, repr=False)
class FoundRate:
    """What :func:`egop.find_lr` found; ``print(...)`` shows it in words.

    Attributes:
        lr: the learning rate that it proposes.
        rates: those that were tried, from small to large.
        losses: at the end of their runs, over all batches held; infinite for a run that diverged.
        said: the outcome in words.

    Example:
        >>> found = egop.FoundRate(lr=0.02, rates=(0.01, 0.02, 0.05), losses=(0.7, 0.4, 0.9), said="lr 0.02.")
        >>> found
        FoundRate(lr=0.02, 3 rates tried)
        >>> print(found)
        lr 0.02.
    """

    lr: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    said: str

    def __repr__(self) -> str:
        """The rate, and of how many it is."""
        return f"FoundRate(lr={self.lr:g}, {counted(len(self.rates), 'rate')} tried)"

    def __str__(self) -> str:
        """The outcome in words."""
        return self.said

    def plot(self) -> Figure:
        """The losses by rate, as a figure of matplotlib; ``plot().savefig("rates.png")`` writes it."""
        from egop.runs import plotting  # needs matplotlib

        ended = [(rate, loss) for rate, loss in zip(self.rates, self.losses, strict=True) if math.isfinite(loss)]
        rates, losses = zip(*ended, strict=True)
        panel = Panel(
            title=f"lr {self.lr:g}",
            xlabel="learning rate",
            ylabel="loss",
            series=[Series("loss after a short run", rates, losses, chosen=self.lr)],
            xscale="log",
            yscale="log" if min(losses) > 0 else "linear",
        )
        return plotting.draw(Picture("learning-rates", self.said, [panel]))


def find_lr(
    objective: Objective,
    make: Make,
    *,
    steps: int = STEPS,
    rates: Sequence[float] = RATES,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> FoundRate:
    """Propose a learning rate for an optimizer, plain or of egop, from short runs.

    Each rate trains a copy of the model for a few steps, with warm-up and decay, on the same batches. The search begins
    in the middle of the rates and goes up, then down, until two in a row are worse. Proposed is the smallest rate that
    is about as good as the best. The model is left as it is, also when this is interrupted.

    It is a rate to begin with: of 15 trainings of 300 steps 10 ended within 5 % of the loss of the best rate, 13 within
    25 %. ``docs/learning-rates.md`` has the table, and how the best rate changes with the length of a training.

    Args:
        objective: the loss, its parameters (the start of every run) and its batches.
        make: ``make(model)`` gives an optimizer of the model that it is called with; or the class of one, or a pair of
            a class and its options. The rate is that of the first parameter group; others keep their ratio to it.
        steps: of each run.
        rates: those to try.
        generator: the source of the seed of batches and dropout; one with seed 0 by default.
        progress: show a progress bar for each run.

    Returns:
        The rate, what was tried, and the outcome in words.

    Raises:
        ValueError: when no rate lowers the loss, or when nothing can be trained.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> batches = [(inputs, inputs.sum(1, keepdim=True)) for inputs in torch.randn(8, 16, 4)]
        >>> loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
        >>> objective = egop.Objective(model, loss, batches)
        >>> found = egop.find_lr(objective, torch.optim.AdamW, progress=False)
        >>> 0.01 < found.lr < 0.5
        True
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=found.lr)
    """
    _, generator = checked(objective, None, None, generator)
    if steps < 1:
        raise ValueError(f"Invalid steps value: {steps}. Must be at least 1.")
    ladder = _checked_rates(rates)
    seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
    runs = _Runs(objective, make, steps, held_batches(objective, steps, seed), seed, progress)
    ends = _searched(ladder, runs.end, runs.start)
    return _proposed(ladder, ends, runs.start, steps)


def _checked_rates(rates: Sequence[float]) -> list[float]:
    ladder = sorted({float(rate) for rate in rates})
    if not ladder or not all(math.isfinite(rate) and rate > 0 for rate in ladder):
        raise ValueError(f"Invalid rates value: {list(rates)}. Must be one or more positive numbers.")
    return ladder


class _Runs:
    """Short runs from one start, on the same batches."""

    def __init__(
        self, objective: Objective, make: Make, steps: int, batches: list[Any], seed: int, progress: bool
    ) -> None:
        self._objective, self._make, self._steps = objective, make, steps
        self._batches, self._seed, self._progress = batches, seed, progress
        with objective.preserved(seed=seed):
            model, loss_fn = objective.trainable_copy()
            check_gradient(model, loss_fn, batches[0])
            _at_rate(_made(make, model), 1.0)
            with torch.no_grad():
                # As a run of rate zero would end: batch norm has to know the data before its loss can be compared.
                model.train()
                batch_losses(model, loss_fn, batches)
                model.eval()
                self.start = batch_losses(model, loss_fn, batches)
        if not _finite(self.start):
            raise ValueError(
                f"The loss is not finite before the first step: {_mean(self.start)}. "
                "No learning rate can be found from here: look at the model's parameters and at the batches."
            )

    def end(self, rate: float) -> tuple[float, ...] | None:
        """The losses of the batches after a run; None when it diverged."""
        with self._objective.preserved(seed=self._seed):
            model, loss_fn = self._objective.trainable_copy()
            optimizer = _made(self._make, model)
            _at_rate(optimizer, rate)
            looks = max(count for count in range(1, _LOOKS + 1) if self._steps % count == 0)
            length = self._steps // looks
            _mode(optimizer, "train")

            def look(model: nn.Module) -> dict[str, float]:
                _mode(optimizer, "eval")
                loss = mean_loss(model, loss_fn, self._batches[:_LOOKED_AT])
                _mode(optimizer, "train")
                return {"loss": math.inf if loss > _RUNAWAY * self._highest > 0 else loss}

            curve = train(
                model,
                optimizer,
                loss_fn,
                Stretches(self._batches, length),
                looks,
                evaluate=look,
                progress=self._progress,
                description=f"lr {rate:<6g}",
                unit="step",
                length=length,
                scheduler=_scheduler(optimizer, self._steps),
            )
            if curve.diverged:
                return None
            _mode(optimizer, "eval")
            model.eval()
            with torch.no_grad():
                losses = batch_losses(model, loss_fn, self._batches)
        return losses if _finite(losses) else None

    @property
    def _highest(self) -> float:
        """The loss of the start, of its worst batch: what is far above it is no fluctuation."""
        return max(self.start)


def _made(make: Make, model: nn.Module) -> torch.optim.Optimizer:
    kind: Any
    options: Mapping[str, Any]
    kind, options = make if isinstance(make, tuple) else (make, {})
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        whole = issubclass(kind, ReparameterizedOptimizer)  # it wants to know what its parameters are
        optimizer = kind(model if whole else trained_parameters(model), **options)  # type: ignore[arg-type]
    elif callable(kind) and not options:
        optimizer = kind(model)
    else:
        raise TypeError(
            "make must be a function of the model that returns an optimizer, the class of one, or a pair of a class "
            f"and its options, got {make!r}."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"make(model) must return a torch.optim.Optimizer, it returned {type(optimizer).__name__}.")
    own = {id(parameter) for parameter in model.parameters()}
    if not all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "make(model) must return an optimizer of the model that it is called with, which is a copy, but it has "
            "parameters of another one. Write lambda model: Optimizer(model.parameters())."
        )
    return optimizer


def _at_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give the first group this rate; others keep their ratio to it."""
    if any("lr" not in group for group in optimizer.param_groups):
        raise ValueError(f"{type(optimizer).__name__} has no learning rate: its parameter groups have no 'lr'.")
    given = [float(group["lr"]) for group in optimizer.param_groups]
    if not given[0] > 0:
        raise ValueError(
            f"The first parameter group has lr {given[0]:g}. It must be positive: others keep their ratio to it."
        )
    for group, own in zip(optimizer.param_groups, given, strict=True):
        scaled = rate * own / given[0]
        group["lr"] = torch.full_like(group["lr"], scaled) if isinstance(group["lr"], Tensor) else scaled


def _scheduler(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Lets the rate rise and fall with the steps; schedule-free optimizers, which average instead, keep theirs."""
    if hasattr(optimizer, "eval"):
        return None
    rise, fall = max(1, round(_WARM_UP * steps)), max(1, round(_DECAY * steps))

    def part(step: int) -> float:
        return min(1.0, (step + 1) / rise, (steps - step) / fall)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, part)


def _mode(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Schedule-free optimizers show the weights of training or those to evaluate; others have no modes."""
    if hasattr(optimizer, name):
        getattr(optimizer, name)()


Ends = dict[float, "tuple[float, ...] | None"]


def _searched(
    ladder: Sequence[float], end: Callable[[float], tuple[float, ...] | None], start: tuple[float, ...]
) -> Ends:
    """The ends of the runs that were needed: from the middle up, then down, until rates only get worse."""
    middle = len(ladder) // 2
    ends: Ends = {ladder[middle]: end(ladder[middle])}
    for upward, direction in ((True, ladder[middle + 1 :]), (False, ladder[:middle][::-1])):
        worse = 0
        for rate in direction:
            if upward and next(reversed(ends.values())) is None:  # above a rate that diverges all do
                break
            best = _loss(ends, _best(ends))
            ends[rate] = end(rate)
            if upward:
                is_worse = _loss(ends, rate) >= best
            else:  # until a rate is of use there is nothing to be worse than
                is_worse = best < _mean(start) and _loss(ends, rate) > _as_good(best, _mean(start))
            worse = worse + 1 if is_worse else 0
            if worse == _WORSE:
                break
    return dict(sorted(ends.items()))


def _proposed(ladder: Sequence[float], ends: Ends, start: tuple[float, ...], steps: int) -> FoundRate:
    rates, losses = tuple(ends), tuple(_loss(ends, rate) for rate in ends)
    best = _best(ends)
    lowest, before = _loss(ends, best), _mean(start)
    tried = f"{counted(len(rates), 'rate')} from {rates[0]:g} to {rates[-1]:g}"
    if not _gains(ends[best], start):
        what = "all runs diverged" if math.isinf(lowest) else f"the lowest loss is {lowest:.3g}, at {best:g}"
        raise ValueError(
            f"None of {tried} brings the loss below that of the start, {before:.3g}, in {counted(steps, 'step')} by "
            f"more than chance could: {what}. Try other rates (rates=) or more steps (steps=)."
        )
    first = last = rates.index(best)
    while first > 0 and losses[first - 1] <= _as_good(lowest, before):
        first -= 1
    while last + 1 < len(rates) and losses[last + 1] <= _as_good(lowest, before):
        last += 1
    lr = rates[first]
    said = [f"lr {lr:g}. The lowest loss after {counted(steps, 'step')} is {lowest:.3g}, with {best:g}, of {tried}."]
    if last - first + 1 == len(rates) > 1:
        said.append("All of them are about as good: these runs cannot tell them apart, longer ones (steps=) might.")
    elif lr < best:
        said.append(f"{lr:g} is about as good: of such rates the smallest is proposed.")
    if lr == ladder[0]:
        said.append(f"{lr:g} is at the end of the rates to try: smaller ones may be better (rates=).")
    if best == ladder[-1]:
        said.append(f"{best:g} is at the end of the rates to try: larger ones may be better (rates=).")
    if diverged := [rate for rate, its_losses in ends.items() if its_losses is None]:
        said.append(f"Runs diverged at {', '.join(f'{rate:g}' for rate in diverged)}.")
    return FoundRate(lr, rates, losses, " ".join(said))


def _as_good(lowest: float, before: float) -> float:
    """Up to which loss a rate is as good as the best one."""
    return lowest + min(_OF_LOSS * abs(lowest), _OF_GAIN * (before - lowest))


def _gains(losses: tuple[float, ...] | None, start: tuple[float, ...]) -> bool:
    """Whether the losses of the batches are lower than at the start by more than chance could."""
    if losses is None:
        return False
    gains = [before - after for before, after in zip(start, losses, strict=True)]
    chance = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return _mean(gains) > _ERRORS * chance


def _best(ends: Ends) -> float:
    return min(ends, key=lambda rate: _loss(ends, rate))


def _loss(ends: Ends, rate: float) -> float:
    losses = ends[rate]
    return math.inf if losses is None else _mean(losses)


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)


def _finite(losses: Sequence[float]) -> bool:
    return all(math.isfinite(loss) for loss in losses)
