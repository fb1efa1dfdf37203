"""Say which optimizer to use, at which learning rate, based on a race."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from egop.diagnose.race import SHORT, Candidate, Comparison, Race, run_race
from egop.diagnose.rates import describe_rates
from egop.estimation import Objective
from egop.formatting import format_table
from egop.optimizer import ReparameterizedOptimizer
from egop.plots import create_axes
from egop.recipes import EGOP
from egop.refresh import Online

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A candidate is recommended if it reaches the same loss in at most this fraction of AdamW's time.
WORTH = 0.95
ADAMW = "AdamW"
_HEADER = ("candidate", "learning rate", "loss", "steps", "step time", "time")


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of :func:`egop.diagnose`. Print it to see the answer and a table.

    Attributes:
        candidates: the candidates, AdamW first.
        race: the runs that the answer is based on.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.ones(8)})
        >>> diagnosis = egop.diagnose(objective, steps=20, progress=False)
        >>> diagnosis.advised  # a vector: there is no weight to rotate
        'AdamW'
    """

    candidates: tuple[Candidate, ...]
    race: Race

    @property
    def advised(self) -> str:
        """Name of the candidate to use; "AdamW" if none of the others is faster."""
        closest = self.closest
        return closest if closest is not None and self.comparisons[closest].time <= WORTH else ADAMW

    @property
    def closest(self) -> str | None:
        """Name of the candidate besides AdamW that reaches the same loss soonest; None if AdamW ran alone."""
        others = {name: each for name, each in self.comparisons.items() if name != ADAMW}
        return min(others, key=lambda name: others[name].time, default=None)

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """Steps and time of each candidate to the same loss as AdamW, in the stage that decides."""
        names = [each.name for each in self.candidates]
        found = {name: self.race.compare(name, self.race.stage) for name in names}
        return {name: comparison for name, comparison in found.items() if comparison is not None}

    @property
    def rates(self) -> tuple[float, ...]:
        """Two or three learning rates to try with the advised candidate, the most likely one first."""
        return self.race.propose_rates(self.advised)

    @property
    def lr(self) -> float:
        """Learning rate to try first with the advised candidate."""
        return self.rates[0]

    @property
    def doubts(self) -> list[str]:
        """Reasons why the answer is uncertain; empty if there are none."""
        race = self.race
        doubts = [f"the race is incomplete ({race.ended})"] if race.ended else []
        if (name := self.closest) is None:
            return doubts
        others = {f"the search ({race.lengths[0]} steps)": race.compare(name, 0)}
        others |= {f"seed {seed}": race.compare(name, 1, seed) for seed in race.seeds[1:]}
        for what, comparison in others.items():
            if comparison is not None and (comparison.time <= WORTH) != (self.advised != ADAMW):
                doubts.append(f"{what} disagrees: {name} takes {_percent(comparison.time)} of AdamW's time")
        if WORTH - 0.05 < self.comparisons[name].time < WORTH + 0.1:
            doubts.append("the times are close")
        if (steps := race.lengths[race.stage]) < SHORT:
            doubts.append(f"runs of {steps} steps say little")
        return doubts

    @property
    def verdict(self) -> str:
        """The answer in four lines."""
        advice = "keep AdamW" if self.advised == ADAMW else f"use {self.advised}"
        advice = f"Perhaps {advice}" if self.doubts else advice[0].upper() + advice[1:]
        rates = f"Learning rate: try {describe_rates(self.rates)}."
        return "\n".join([f"{advice}: {self.code}", rates, self._gain(), self._certainty()])

    @property
    def code(self) -> str:
        """Code to paste for the advised candidate."""
        (candidate,) = [each for each in self.candidates if each.name == self.advised]
        return candidate.code.format(lr=f"{self.lr:g}")

    def _gain(self) -> str:
        if (name := self.closest) is None:
            return "Gain: none. AdamW ran alone, see below."
        comparison = self.comparisons[name]
        if math.isinf(comparison.steps):
            return f"Gain: none. {name}, the closest, did not lower the loss."
        reason = "no time saved" if comparison.time >= 1 else "too small to switch"
        who = f"{name} reaches" if name == self.advised else f"{reason}. {name}, the closest, reaches"
        return (
            f"Gain: {who} the same loss in {_percent(comparison.steps)} of AdamW's steps and "
            f"{_percent(comparison.time)} of its time (a step takes {comparison.slowdown:.2f} x as long)."
        )

    def _certainty(self) -> str:
        if self.doubts:
            return f"Uncertain: {'; '.join(self.doubts)}."
        seeds = len(self.race.seeds)
        return f"Consistent: both stages of the race{f' and {seeds} seeds' if seeds > 1 else ''} agree."

    def _rows(self) -> list[list[str]]:
        rows = []
        for name in (each.name for each in self.candidates):
            runs, comparison = self.race.ranked(name), self.comparisons.get(name)
            cells = [f"{runs[0].lr:g}", f"{runs[0].final:.4g}"] if runs else ["-", "-"]
            if comparison is not None:
                cells += [f"{value:.2f}" for value in (comparison.steps, comparison.slowdown, comparison.time)]
            rows.append([name, *cells, *["-"] * (len(_HEADER) - 1 - len(cells))])
        return rows

    def __repr__(self) -> str:
        return f"Diagnosis({self.advised}, lr={self.lr:g}, {'uncertain' if self.doubts else 'consistent'})"

    def __str__(self) -> str:
        legend = (
            f"Loss after runs of {self.race.lengths[self.race.stage]} steps. Steps and time to the same loss, and "
            "step time, are multiples of AdamW's."
        )
        notes = [f"{name} was left out: {reason}." for name, reason in self.race.left_out.items()]
        if self.lr != self.race.ranked(self.advised)[0].lr:
            notes = ["Longer training usually needs lower rates: those to try are scaled to its length.", *notes]
        return "\n".join([self.verdict, "", format_table(_HEADER, self._rows()), legend, *notes])

    def plot(self) -> Figure:
        """Plot the race: the loss of each candidate at its best learning rate, by step."""
        best = {each.name: runs[0] for each in self.candidates if (runs := self.race.ranked(each.name))}
        positive = all(loss > 0 for run in best.values() for loss in run.losses)
        figure, axes = create_axes(
            title=f"Race: {self.advised}", xlabel="step", ylabel="loss", yscale="log" if positive else "linear"
        )
        for name, run in best.items():
            steps = [min(index * run.every, run.steps) for index in range(len(run.losses))]
            axes.plot(steps, run.losses, label=f"{name}, lr {run.lr:g}")
        axes.legend()
        return figure


def diagnose(
    objective: Objective,
    *,
    steps: int | None = None,
    budget: float = 150.0,
    seeds: Sequence[int] = (0, 1),
    progress: bool = True,
) -> Diagnosis:
    """Race AdamW against egop's optimizers on copies of the model and say which one to use.

    The candidates are AdamW, :class:`egop.EGOP` with and without its rotation, and AdamW with :class:`egop.Online`. For
    each one, runs of 8 % of the planned training search for the best learning rate, and runs of 20 % repeat the best
    two rates. All runs have warm-up and decay. A candidate is recommended if it reaches the same loss in at most
    95 % of AdamW's time. The model, its gradients and the random state are left unchanged, even after Ctrl-C, which
    returns the results so far.

    Copies train in the mode that the model is in: call ``model.train()`` first.

    Args:
        objective: the model, its loss and its batches.
        steps: number of steps of the planned training. If unknown, runs take 60 steps, then 150.
        budget: time limit of the race in seconds; runs are shortened to fit, but to no less than 20 steps, then 50.
        seeds: seeds of the batches and of dropout. The first one decides; the others repeat the deciding comparison.
        progress: print the expected time and show a progress bar.

    Raises:
        ValueError: if AdamW does not lower the loss at any learning rate, or if there is nothing to train.
        TimeoutError: if the budget is used up before AdamW lowers the loss.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> batches = [(inputs, inputs.prod(1, keepdim=True)) for inputs in torch.randn(8, 16, 4)]
        >>> loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
        >>> diagnosis = egop.diagnose(egop.Objective(model, loss, batches), steps=20, seeds=(0,), progress=False)
        >>> len(diagnosis.verdict.splitlines())
        4
        >>> sorted(diagnosis.comparisons)
        ['AdamW', 'AdamW with Online', 'EGOP', 'EGOP without rotation']
    """
    race = run_race(objective, CANDIDATES, steps=steps, budget=budget, seeds=seeds, keep=2, progress=progress)
    return Diagnosis(tuple(each for each in CANDIDATES if race.runs[0].get(each.name)), race)


CANDIDATES = (
    Candidate(ADAMW, torch.optim.AdamW, "torch.optim.AdamW(model.parameters(), lr={lr})"),
    Candidate("EGOP", EGOP, "egop.EGOP(model, lr={lr})"),
    Candidate(
        "AdamW with Online",
        partial(ReparameterizedOptimizer, optimizer_class=torch.optim.AdamW, refresh=Online(), lr=1e-3),
        "egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=egop.Online(), lr={lr})",
    ),
    Candidate("EGOP without rotation", (EGOP, {"rotate": False}), "egop.EGOP(model, lr={lr}, rotate=False)"),
)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"
