"""What is claimed of the Fashion-MNIST runs, and what is found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from egop_lab.experiments.base import Judged, verdict
from egop_lab.experiments.curves import first_below, median
from egop_lab.training.records import Record

_CONVERGED = 0.995  # of the best validation accuracy


@dataclass(frozen=True)
class Method:
    """Auxiliary variables of a rank, 0 for original coordinates; reduced: the leading directions alone."""

    rank: int
    reduced: bool = False

    def __str__(self) -> str:
        return f"r = {self.rank}{', these alone' if self.reduced else ''}" if self.rank else "original"


@dataclass(frozen=True)
class Found:
    """The reported runs of a method, and the seconds of a single one."""

    runs: Sequence[Record]
    seconds_per_epoch: float
    estimation: float

    def curves(self, name: str) -> list[list[float]]:
        """A recorded curve of every run."""
        return [run.result[name] for run in self.runs]

    def converged(self) -> list[int]:
        """The first epoch with 99.5 % of a run's best validation accuracy, for every run."""
        curves = self.curves("validation accuracy")
        epochs = [first_below([-value for value in curve], -_CONVERGED * max(curve)) for curve in curves]
        return [epoch for epoch in epochs if epoch is not None]  # the best one is always above

    def seconds(self, estimation: bool) -> list[float]:
        """Time in training steps until convergence, and that of the estimation where wanted, for every run."""
        return [self.seconds_per_epoch * epochs + estimation * self.estimation for epochs in self.converged()]


def beats(rank: int, epochs: Mapping[int, int | None]) -> Judged:
    """Compared by the epochs to the lowest training loss that original coordinates reach."""
    turned, original = epochs[rank], epochs[0]
    assert original is not None
    reached = f"after {turned}" if turned is not None else "not reached"
    words = f"With r = {rank} the training loss falls faster by epoch than in original coordinates."
    finding = f"Epochs to the lowest loss of original coordinates: {reached}; original: {original}."
    return Judged(f"fashion-mnist/r{rank}-faster", words, verdict(turned is not None and turned < original), finding)


def grows(epochs: Mapping[int, int | None]) -> Judged:
    """Compared by the same epochs."""
    needed = {rank: epochs[rank] for rank in sorted(epochs) if rank}
    values = [math.inf if value is None else value for value in needed.values()]
    ordered = all(earlier >= later for earlier, later in pairwise(values)) and values[0] > values[-1]
    shown = "; ".join(f"{Method(rank)}: {'not reached' if value is None else value}" for rank, value in needed.items())
    words = "The gain grows with r."
    finding = f"Epochs to the lowest loss of original coordinates (holds when they never rise, and fall): {shown}."
    return Judged("fashion-mnist/grows", words, verdict(ordered), finding)


def accurate(rank: int, found: Mapping[int, Found]) -> Judged:
    """Compared by the medians of each run's best."""
    turned, original = (
        -median([-max(curve) for curve in found[key].curves("validation accuracy")]) for key in (rank, 0)
    )
    words = f"With r = {rank} the best validation accuracy is as good or better."
    shown = f"{Method(rank)}: {turned:.2%}; original: {original:.2%}."
    return Judged(f"fashion-mnist/r{rank}-accuracy", words, verdict(turned >= original), shown)


def wall_clock(found: Mapping[int, Found], *, judged: bool) -> Judged:
    """The winner is looked for with the estimation counted, as a user would have to."""
    times = {rank: median(results.seconds(True)) for rank, results in found.items()}
    alone = {rank: median(results.seconds(False)) for rank, results in found.items()}
    winner = min(times, key=lambda rank: times[rank])
    shown = "; ".join(f"{Method(rank)}: {times[rank]:.3g} ({alone[rank]:.3g})" for rank in times)
    note = "" if judged else " This preset has too few images, epochs and ranks for convergence times to mean much."
    return Judged(
        "fashion-mnist/wall-clock",
        "Intermediate r converges first by the clock.",
        verdict(winner in sorted(rank for rank in times if rank)[1:-1]) if judged else "cannot be judged",
        f"Seconds to 99.5 % of the best validation accuracy, in brackets without estimation: {shown}.{note}",
    )
