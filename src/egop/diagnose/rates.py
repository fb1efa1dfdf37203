"""Find a learning rate for one optimizer, by a race with a single candidate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from egop.diagnose.race import RATES, SHORT, Candidate, Race, run_race
from egop.diagnose.training import DECAY, WARM_UP, Build
from egop.estimation import Objective
from egop.formatting import pluralize
from egop.plots import create_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SCHEDULE = (
    f"for warm-up over the first {100 * WARM_UP:.0f} % and decay over the last {100 * DECAY:.0f} % of training; "
    "for a constant rate, divide by three"
)


@dataclass(frozen=True, repr=False)
class FoundRates:
    """Learning rates to try, from :func:`egop.find_lr`. Iterate over it to get the rates.

    Attributes:
        rates: two or three rates, the most likely one first (only one if no other rate lowered the loss).
        race: the runs that they come from.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [torch.ones(8, 4)])
        >>> found = egop.find_lr(objective, torch.optim.SGD, rates=(0.01, 0.1), progress=False)
        >>> list(found)
        [0.1, 0.01]
    """

    rates: tuple[float, ...]
    race: Race

    @property
    def lr(self) -> float:
        """Learning rate to try first."""
        return self.rates[0]

    @property
    def tried(self) -> dict[float, float]:
        """Final loss of each rate in the first stage; infinite where the run diverged."""
        (runs,) = self.race.runs[0].values()
        return {run.lr: run.final for run in sorted(runs, key=lambda run: run.lr)}

    def __iter__(self) -> Iterator[float]:
        return iter(self.rates)

    def __repr__(self) -> str:
        return f"FoundRates({', '.join(f'{rate:g}' for rate in self.rates)}; {len(self.tried)} tried)"

    def __str__(self) -> str:
        race, tried = self.race, self.tried
        best = race.ranked(next(iter(race.runs[0])))[0]
        tested = f"Raced {pluralize(len(tried), 'rate')} from {min(tried):g} to {max(tried):g}"
        words = [
            f"Try lr {describe_rates(self.rates)}, and go on if the lowest or highest is best.",
            f"{tested}; {best.lr:g} was best in {pluralize(best.steps, 'step')}.",
            f"Longer training usually needs lower rates{'' if race.planned else ' (steps=)'}.",
        ]
        if best.steps < SHORT:
            words.append("Runs this short say little.")
        if best.lr in (min(tried), max(tried)) and len(tried) > 1:
            words.append(f"{best.lr:g} is at the edge of what was tried, so another rate may be better (rates=).")
        if race.ended:
            words.append(f"The race is incomplete: {race.ended}.")
        return " ".join(words)

    def plot(self) -> Figure:
        """Plot the final losses of the first stage by learning rate."""
        finite = {rate: loss for rate, loss in self.tried.items() if math.isfinite(loss)}
        figure, axes = create_axes(
            title=f"lr {self.lr:g}",
            xlabel="learning rate",
            ylabel=f"loss after {self.race.lengths[0]} steps",
            xscale="log",
            yscale="log" if min(finite.values()) > 0 else "linear",
        )
        axes.plot(list(finite), list(finite.values()), marker=".")
        chosen = [rate for rate in self.rates if rate in finite]
        axes.plot(chosen, [finite[rate] for rate in chosen], marker="*", markersize=12, linestyle="none")
        return figure


def find_lr(
    objective: Objective,
    optimizer: Build,
    *,
    steps: int | None = None,
    budget: float = 60.0,
    seed: int = 0,
    rates: Sequence[float] = RATES,
    progress: bool = True,
) -> FoundRates:
    """Find two or three learning rates to try, from short runs on copies of the model.

    Each rate trains a copy for 8 % of the planned training, with warm-up and decay, and the best three are repeated
    with 20 % of it. Longer training usually needs lower rates, so the best one is proposed divided by the root of the
    ratio of lengths, divided by the ratio, and as it is. The model is left unchanged, even after Ctrl-C, which returns
    the results so far. Copies train in the mode that the model is in: call ``model.train()`` first.

    Args:
        objective: the model, its loss and its batches.
        optimizer: an optimizer class, a pair of a class and its options, or a function of the model that returns an
            optimizer. The rates are those of the first parameter group; other groups keep their ratio to it.
        steps: number of steps of the planned training. If unknown, runs take 60 steps, then 150.
        budget: time limit in seconds; runs are shortened to fit, but to no less than 20 steps, then 50.
        seed: seed of the batches and of dropout.
        rates: learning rates to try. The result has only one if no other lowers the loss.
        progress: print the expected time and show a progress bar.

    Raises:
        ValueError: if no rate lowers the loss, or if there is nothing to train.
        TimeoutError: if the budget is used up before any run lowers the loss.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> batches = [(inputs, inputs.sum(1, keepdim=True)) for inputs in torch.randn(8, 16, 4)]
        >>> loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
        >>> found = egop.find_lr(egop.Objective(model, loss, batches), torch.optim.AdamW, progress=False)
        >>> found.lr > 0.01
        True
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=found.lr)
    """
    kind = optimizer[0] if isinstance(optimizer, tuple) else optimizer
    candidate = Candidate(kind.__name__ if isinstance(kind, type) else "the optimizer", optimizer)
    race = run_race(
        objective, [candidate], steps=steps, budget=budget, seeds=(seed,), keep=3, rates=rates, progress=progress
    )
    return FoundRates(race.propose_rates(candidate.name), race)


def describe_rates(rates: Sequence[float]) -> str:
    """Say which rates to try, and for which schedule."""
    first, *others = (f"{rate:g}" for rate in rates)
    return f"{first}{', then ' if others else ''}{' and '.join(others)} ({_SCHEDULE})"
