"""Which learning rates are tried one after the other, and which of them is proposed; the runs are someone else's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from egop.formatting import format_html_table, pluralize
from egop.plots import create_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FoundRate", "finite", "mean", "proposed", "searched"]

# A rate is as good as the best one when its loss is higher by less than these parts: of the lowest loss, and of what
# the best rate gained. The smallest such rate is proposed: where it was wrong, it was less so than the best one.
_OF_LOSS, _OF_GAIN = 0.25, 0.05
# A gain counts when it is more than so many standard errors over the batches.
_ERRORS = 2.0
# So many rates in a row that are no better going up, or not as good going down, end the search in their direction.
_WORSE = 2

Ends = dict[float, "tuple[float, ...] | None"]  # of runs: the losses of the batches, None when one diverged


@dataclass(frozen=True, repr=False)
class FoundRate:
    """What :func:`egop.find_lr` found; ``print(...)`` shows it in words.

    Attributes:
        lr: the learning rate that it proposes.
        rates: those that were tried, from small to large.
        losses: at the end of their runs, over all batches held; infinite for a run that diverged.
        said: the outcome in words.

    Example:
        >>> found = egop.diagnostics.FoundRate(lr=0.02, rates=(0.01, 0.02), losses=(0.7, 0.4), said="lr 0.02.")
        >>> found
        FoundRate(lr=0.02, 2 rates tried)
        >>> print(found)
        lr 0.02.
    """

    lr: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    said: str

    def __repr__(self) -> str:
        """The rate, and of how many it is."""
        return f"FoundRate(lr={self.lr:g}, {pluralize(len(self.rates), 'rate')} tried)"

    def __str__(self) -> str:
        """The outcome in words."""
        return self.said

    def _repr_html_(self) -> str:
        """The outcome and all rates with their losses, for a notebook."""
        ended = [f"{loss:.4g}" if math.isfinite(loss) else "diverged" for loss in self.losses]
        proposed = ["proposed" if rate == self.lr else "" for rate in self.rates]
        rows = [[f"{rate:g}", *cells] for rate, *cells in zip(self.rates, ended, proposed, strict=True)]
        return f"<p>{escape(self.said)}</p>{format_html_table(['learning rate', 'loss', ''], rows)}"

    def plot(self) -> Figure:
        """Plot the final losses by learning rate."""
        ended = [(rate, loss) for rate, loss in zip(self.rates, self.losses, strict=True) if math.isfinite(loss)]
        rates, losses = zip(*ended, strict=True)
        figure, axes = create_axes(
            title=f"lr {self.lr:g}",
            xlabel="learning rate",
            ylabel="loss after a short run",
            xscale="log",
            yscale="log" if min(losses) > 0 else "linear",
        )
        axes.plot(rates, losses, marker=".")
        axes.plot([self.lr], [losses[rates.index(self.lr)]], marker="*", markersize=12)
        return figure


def searched(
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
                is_worse = best < mean(start) and _loss(ends, rate) > _as_good(best, mean(start))
            worse = worse + 1 if is_worse else 0
            if worse == _WORSE:
                break
    return dict(sorted(ends.items()))


def proposed(ladder: Sequence[float], ends: Ends, start: tuple[float, ...], steps: int) -> FoundRate:
    """The smallest rate that is about as good as the best, and what is to be said of it."""
    rates, losses = tuple(ends), tuple(_loss(ends, rate) for rate in ends)
    best = _best(ends)
    lowest, before = _loss(ends, best), mean(start)
    tried = f"{pluralize(len(rates), 'rate')} from {rates[0]:g} to {rates[-1]:g}"
    if not _gains(ends[best], start):
        what = "all runs diverged" if math.isinf(lowest) else f"the lowest loss is {lowest:.3g}, at {best:g}"
        raise ValueError(
            f"None of {tried} brings the loss below that of the start, {before:.3g}, in {pluralize(steps, 'step')} by "
            f"more than chance could: {what}. Try other rates (rates=) or more steps (steps=)."
        )
    first = last = rates.index(best)
    while first > 0 and losses[first - 1] <= _as_good(lowest, before):
        first -= 1
    while last + 1 < len(rates) and losses[last + 1] <= _as_good(lowest, before):
        last += 1
    lr = rates[first]
    said = [f"lr {lr:g}. The lowest loss after {pluralize(steps, 'step')} is {lowest:.3g}, with {best:g}, of {tried}."]
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
    return mean(gains) > _ERRORS * chance


def _best(ends: Ends) -> float:
    return min(ends, key=lambda rate: _loss(ends, rate))


def _loss(ends: Ends, rate: float) -> float:
    losses = ends[rate]
    return math.inf if losses is None else mean(losses)


def mean(losses: Sequence[float]) -> float:
    """Of the losses of the batches."""
    return sum(losses) / len(losses)


def finite(losses: Sequence[float]) -> bool:
    """Whether all of them are."""
    return all(math.isfinite(loss) for loss in losses)
