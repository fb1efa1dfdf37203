"""A short race: one model, start and grid of learning rates, in original and in EGOP coordinates."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from egop.basis import Basis
from egop.diagnostics.expected import TITLES
from egop.diagnostics.forms import FIXED, maker
from egop.diagnostics.short_runs import Curve, check_gradient, held_batches, mean_loss, train
from egop.estimation import Objective
from egop.formatting import pluralize

__all__ = ["LEARNING_RATES", "STEPS", "Race", "Run", "end", "race"]

STEPS = 300
LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)

# The loss is looked at this often in a run.
_POINTS = 30
# Losses jump from batch to batch, so a run is judged by the median of its last so many looks.
_LAST = 5
# The loss that is compared is over the first so many batches.
_COMPARED = 10


@dataclass(frozen=True)
class Run:
    """A curve and the settings it was made with; ``coordinates`` is "original" or "EGOP"."""

    optimizer: str
    coordinates: str
    lr: float
    curve: Curve


@dataclass(frozen=True)
class Race:
    """What a race found, also while it is still running.

    Attributes:
        optimizer: the name of the optimizer class, the same on both sides.
        basis: what the EGOP side ran with, in words.
        steps: of each run.
        every: how many steps lie between two entries of a curve.
        learning_rates: the grid, the same on both sides.
        seed: of the batches and of dropout.
        runs: the finished ones: for each learning rate the one in original coordinates, then the one in EGOP ones.
    """

    optimizer: str
    basis: str
    steps: int
    every: int
    learning_rates: tuple[float, ...]
    seed: int
    runs: tuple[Run, ...] = ()

    @property
    def partial(self) -> str:
        """What is missing; empty when all runs are finished."""
        missing = 2 * len(self.learning_rates) - len(self.runs)
        return f"{len(self.runs)} of {len(self.runs) + missing} runs of the race are finished" if missing else ""

    def best(self) -> tuple[Run, Run] | None:
        """The run with the lowest loss at its end on each side, original first; None where a side has none to show.

        Only learning rates that both sides have tried count.
        """
        paired = self.runs[: len(self.runs) // 2 * 2]
        sides = [[run for run in paired[side::2] if not run.curve.diverged] for side in (0, 1)]
        if not all(sides):
            return None
        original, reparameterized = (min(runs, key=end) for runs in sides)
        return original, reparameterized

    def summary(self) -> str:
        """What happened, in words made from the numbers."""
        best = self.best()
        if best is None:
            tried = pluralize(len(self.runs) // 2, "rate")
            return f"No comparison: one of the sides has no run with a finite loss ({tried} tried on both)."
        original, changed = best
        said = (
            f"{self.optimizer}, {pluralize(self.steps, 'step')} from one start, the best of the learning rates tried "
            f"on both sides: loss {end(original):.3g} in original coordinates (lr {original.lr:g}), "
            f"{end(changed):.3g} in EGOP coordinates (lr {changed.lr:g})."
        )
        sentences = [said]
        reached = changed.curve.find(end(original))
        if end(changed) < end(original) and reached is not None:
            sentences.append(f"EGOP first had the original's loss after {reached * self.every} steps.")
        elif end(changed) > end(original):
            sentences.append("EGOP coordinates were worse here.")
        slower = changed.curve.seconds / original.curve.seconds if original.curve.seconds else math.nan
        sentences.append(f"Its steps took {slower:.2g} times as long.")
        edges = {self.learning_rates[0], self.learning_rates[-1]}
        if edges & {original.lr, changed.lr}:
            sentences.append("A best learning rate is at the edge of the grid, so it may not be the best there is.")
        return " ".join([*sentences, "One seed and a short run: this shows what can happen, not how often."])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON."""
        return asdict(self) | {"summary": self.summary(), "partial": self.partial}


def end(run: Run) -> float:
    """The loss at the end of a run: the median of its last few looks; that of a run that diverged is not finite."""
    return run.curve.loss[-1] if run.curve.diverged else statistics.median(run.curve.loss[-_LAST:])


def race(
    objective: Objective,
    basis: Basis | None,
    *,
    form: str = FIXED,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = STEPS,
    learning_rates: Sequence[float] = LEARNING_RATES,
    seed: int = 0,
    progress: bool = True,
    show: Callable[[Race], object] | None = None,
) -> Race:
    """Train copies of the model for a short while in both coordinates. The model itself is left as it is.

    Args:
        objective: the loss, its parameters (the start of every run) and its batches.
        basis: the basis of the EGOP side, where that is estimated before the training.
        form: what that side is.
        optimizer: the class that both sides use, unless the form is EGOP.
        steps: of each run.
        learning_rates: tried on both sides.
        seed: of the batches and of dropout, the same for every run.
        progress: show progress bars on standard error.
        show: called with the race so far after every run.
    """
    if steps < 1:
        raise ValueError(f"Invalid steps value: {steps}. Must be at least 1.")
    every = max(1, math.ceil(steps / _POINTS))
    steps = math.ceil(steps / every) * every
    result = Race(optimizer.__name__, TITLES[form], steps, every, tuple(learning_rates), seed)
    batches = held_batches(objective, result.steps, seed)
    compared = batches[:_COMPARED]
    for lr, coordinates in itertools.product(learning_rates, ("original", "EGOP")):
        with objective.preserve(seed=seed):
            model, loss_fn = objective.trainable_copy()
            runner = maker("" if coordinates == "original" else form, basis, optimizer)(model, lr=lr)
            check_gradient(model, loss_fn, batches[0])
            curve = train(
                model,
                runner,
                loss_fn,
                batches,
                steps=result.steps,
                every=every,
                evaluate=lambda model, loss_fn=loss_fn: mean_loss(model, loss_fn, compared),  # type: ignore[misc]
                progress=progress,
                description=f"{coordinates:>8}, lr {lr:<6g}",
            )
        result = replace(result, runs=(*result.runs, Run(optimizer.__name__, coordinates, lr, curve)))
        if show is not None:
            show(result)
    return result
