"""A learning rate for an optimizer, from short runs on copies of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from egop.diagnostics.rate_search import FoundRate, finite, mean, proposed, searched
from egop.diagnostics.short_runs import (
    batch_losses,
    check_gradient,
    held_batches,
    mean_loss,
    train,
    trained_parameters,
)
from egop.estimation import Objective, resolve_arguments
from egop.optimizer import ReparameterizedOptimizer

__all__ = ["RATES", "STEPS", "find_lr", "rate_of"]

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
    is about as good as the best. The model is left as it is, also when this is interrupted. Copies train in the mode
    that the model is in: call ``model.train()`` first if you will train so.

    It is a rate to begin with: on 18 problems that nothing was chosen on, 57 of 90 trainings of 150 to 400 steps ended
    within 5 % of the loss of a tuned rate, 66 within 25 %; where it was wrong it was mostly too large.
    ``docs/learning-rates.md`` has the table, and how the best rate changes with the length of a training.

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
    _, generator = resolve_arguments(objective, None, None, generator)
    if steps < 1:
        raise ValueError(f"Invalid steps value: {steps}. Must be at least 1.")
    ladder = _checked_rates(rates)
    seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
    return rate_of(objective, make, steps=steps, rates=ladder, seed=seed, progress=progress)


def rate_of(
    objective: Objective,
    make: Make,
    *,
    steps: int,
    seed: int,
    rates: Sequence[float] = RATES,
    progress: bool = False,
    tick: Callable[[], object] = lambda: None,
) -> FoundRate:
    """The same, of arguments that are known to be right; ``tick`` is called after each run."""
    runs = _Runs(objective, make, steps, held_batches(objective, steps, seed), seed, progress)

    def end(rate: float) -> tuple[float, ...] | None:
        losses = runs.end(rate)
        tick()
        return losses

    return proposed(rates, searched(rates, end, runs.start), runs.start, steps)


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
        with objective.preserve(seed=seed):
            model, loss_fn = objective.trainable_copy()
            check_gradient(model, loss_fn, batches[0])
            _at_rate(_made(make, model), 1.0)
            with torch.no_grad():
                # As a run of rate zero would end: batch norm has to know the data before its loss can be compared.
                batch_losses(model, loss_fn, batches)
                model.eval()
                self.start = batch_losses(model, loss_fn, batches)
        if not finite(self.start):
            raise ValueError(
                f"The loss is not finite before the first step: {mean(self.start)}. "
                "No learning rate can be found from here: look at the model's parameters and at the batches."
            )

    def end(self, rate: float) -> tuple[float, ...] | None:
        """The losses of the batches after a run; None when it diverged."""
        with self._objective.preserve(seed=self._seed):
            model, loss_fn = self._objective.trainable_copy()
            optimizer = _made(self._make, model)
            _at_rate(optimizer, rate)
            looks = max(count for count in range(1, _LOOKS + 1) if self._steps % count == 0)
            length = self._steps // looks
            _mode(optimizer, "train")

            def look(model: nn.Module) -> float:
                _mode(optimizer, "eval")
                loss = mean_loss(model, loss_fn, self._batches[:_LOOKED_AT])
                _mode(optimizer, "train")
                return math.inf if loss > _RUNAWAY * self._highest > 0 else loss

            curve = train(
                model,
                optimizer,
                loss_fn,
                self._batches,
                steps=self._steps,
                every=length,
                evaluate=look,
                scheduler=_scheduler(optimizer, self._steps),
                progress=self._progress,
                description=f"lr {rate:<6g}",
            )
            if curve.diverged:
                return None
            _mode(optimizer, "eval")
            model.eval()
            with torch.no_grad():
                losses = batch_losses(model, loss_fn, self._batches)
        return losses if finite(losses) else None

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
