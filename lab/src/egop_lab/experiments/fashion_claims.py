"""The paper's claims about Fashion-MNIST, judged."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from egop_lab.experiments.base import Alternative, Judgement, count_decades, to_verdict
from egop_lab.experiments.curves import first_below, median
from egop_lab.training.records import Record

_CONVERGED = 0.995  # of the best validation accuracy
_ENOUGH = 1000  # directions
_CAPTURED = 0.95  # of the sum of eigenvalues


@dataclass(frozen=True)
class Method:
    """Auxiliary variables of a rank, 0 for original coordinates; reduced: the leading directions alone."""

    rank: int
    reduced: bool = False

    def __str__(self) -> str:
        return f"r = {self.rank}{', these alone' if self.reduced else ''}" if self.rank else "original"


@dataclass(frozen=True)
class MethodRuns:
    """The reported runs of a method, and the time of a single one."""

    runs: Sequence[Record]
    seconds_per_epoch: float
    estimation: float

    def curves(self, name: str) -> list[list[float]]:
        return [run.result[name] for run in self.runs]

    def epochs_to_convergence(self) -> list[int]:
        """Return for every run the first epoch with 99.5 % of its best validation accuracy."""
        curves = self.curves("validation accuracy")
        epochs = [first_below([-value for value in curve], -_CONVERGED * max(curve)) for curve in curves]
        return [epoch for epoch in epochs if epoch is not None]  # the best one is always above

    def seconds(self, estimation: bool) -> list[float]:
        """Return for every run the training time until convergence, with that of the estimation if wanted."""
        return [
            self.seconds_per_epoch * epochs + estimation * self.estimation for epochs in self.epochs_to_convergence()
        ]


def judge_faster(rank: int, epochs: Mapping[int, int | None]) -> Judgement:
    """Compare the epochs to the lowest training loss of original coordinates."""
    turned, original = epochs[rank], epochs[0]
    assert original is not None
    reached = f"after {turned}" if turned is not None else "not reached"
    words = f"With r = {rank} the training loss falls faster by epoch than in original coordinates."
    finding = f"Epochs to the lowest loss of original coordinates: {reached}; original: {original}."
    holds = to_verdict(turned is not None and turned < original)
    margin = None if turned is None else count_decades(turned, original)
    threshold = "faster: fewer epochs to that loss"
    return Judgement(f"fashion-mnist/r{rank}-faster", words, holds, finding, threshold=threshold, margin=margin)


def judge_growth(epochs: Mapping[int, int | None]) -> Judgement:
    """Compare the same epochs across ranks."""
    needed = {rank: epochs[rank] for rank in sorted(epochs) if rank}
    values = [math.inf if value is None else value for value in needed.values()]
    ordered = all(earlier >= later for earlier, later in pairwise(values)) and values[0] > values[-1]
    shown = "; ".join(f"{Method(rank)}: {'not reached' if value is None else value}" for rank, value in needed.items())
    words = "The gain grows with r."
    finding = f"Epochs to the lowest loss of original coordinates: {shown}."
    return Judgement(
        "fashion-mnist/grows", words, to_verdict(ordered), finding, threshold="they never rise with r, and fall overall"
    )


def compare_at_equal_settings(ranks: Sequence[int], finals: Sequence[Sequence[float]]) -> Alternative:
    """Compare the final losses of each rank, in this order, for every learning rate and weight decay.

    The first is original coordinates, whose gain is none: a gain that grows begins there.
    """
    finite = [losses for losses in finals if all(map(math.isfinite, losses))]
    # For each rank and the next: at how many settings the loss is lower.
    better = [sum(later < earlier for earlier, later in pairs) for pairs in zip(*map(pairwise, finite), strict=True)]
    steps = [
        f"{Method(one)} to {Method(other)}: {count}"
        for (one, other), count in zip(pairwise(ranks), better, strict=True)
    ]
    return Alternative(
        "final loss at equal learning rate and weight decay: lower with the next larger r at most of them",
        to_verdict(bool(finite) and all(2 * count > len(finite) for count in better)),
        f"Lower, of {len(finite)} combinations: {'; '.join(steps)}.",
    )


def judge_accuracy(rank: int, found: Mapping[int, MethodRuns]) -> Judgement:
    """Compare the medians of each run's best validation accuracy."""
    turned, original = (median([max(curve) for curve in found[key].curves("validation accuracy")]) for key in (rank, 0))
    words = f"With r = {rank} the best validation accuracy is as good or better."
    shown = f"{Method(rank)}: {turned:.2%}; original: {original:.2%}."
    return Judgement(f"fashion-mnist/r{rank}-accuracy", words, to_verdict(turned >= original), shown)


def judge_wall_clock(found: Mapping[int, MethodRuns], *, judged: bool) -> Judgement:
    """Find the fastest rank, with the estimation counted."""
    times = {rank: median(results.seconds(True)) for rank, results in found.items()}
    alone = {rank: median(results.seconds(False)) for rank, results in found.items()}
    winner = min(times, key=lambda rank: times[rank])
    shown = "; ".join(f"{Method(rank)}: {times[rank]:.3g} ({alone[rank]:.3g})" for rank in times)
    note = "" if judged else " This preset has too few images, epochs and ranks for convergence times to mean much."
    return Judgement(
        "fashion-mnist/wall-clock",
        "Intermediate r converges first by the clock.",
        to_verdict(winner in sorted(rank for rank in times if rank)[1:-1]) if judged else "cannot be judged",
        f"Seconds to 99.5 % of the best validation accuracy, in brackets without estimation: {shown}.{note}",
        paper="r = 1000 is fastest",
        margin=_against_ends(times) if judged else None,
    )


def judge_sooner(found: Mapping[int, MethodRuns], *, judged: bool) -> Judgement:
    """Compare the best rank with original coordinates, with the estimation counted; without it as an alternative."""
    by_rule = {
        counted: {rank: median(own.seconds(counted)) for rank, own in found.items()} for counted in (True, False)
    }
    words = "Auxiliary variables converge sooner by the clock than original coordinates."
    compared = {}
    for counted, times in by_rule.items():
        best = min((rank for rank in times if rank), key=lambda rank: times[rank])
        shown = f"Seconds to 99.5 % of the best validation accuracy: {Method(best)}, the fastest: {times[best]:.3g}; "
        compared[counted] = Judgement(
            "fashion-mnist/sooner",
            words,
            to_verdict(times[best] < times[0]) if judged else "cannot be judged",
            f"{shown}original: {times[0]:.3g}.",
            margin=count_decades(times[best], times[0]) if judged else None,
        )
    return compared[True].add_alternative("without estimation", compared[False])


def _against_ends(times: Mapping[int, float]) -> float | None:
    """Return how far the best intermediate rank is below the best of the others."""
    between = sorted(rank for rank in times if rank)[1:-1]
    best, other = (min(times[r] for r in times if (r in between) == inside) for inside in (True, False))
    return count_decades(best, other)


def judge_auxiliary(reduced: Method, whole: MethodRuns, alone: MethodRuns) -> Judgement:
    """Judge the paper's expectation by the medians of each run's best validation accuracy."""
    with_rest, without = (
        median([max(curve) for curve in results.curves("validation accuracy")]) for results in (whole, alone)
    )
    return Judgement(
        "fashion-mnist/auxiliary",
        "Auxiliary variables perform better than the leading directions alone.",
        to_verdict(with_rest > without),
        f"Best validation accuracy with {Method(reduced.rank)}: {with_rest:.1%}; these alone: {without:.1%}.",
        margin=count_decades(1 - with_rest, 1 - without),
    )


def judge_rank(spectrum: Mapping[str, Any], *, judged: bool) -> Judgement:
    """Compute the share of the sum of eigenvalues, interpolated between the recorded ones."""
    index, values = spectrum["index"], spectrum["eigenvalues"]
    every = np.interp(np.arange(1, index[-1] + 1), index, values)
    share = float(every[:_ENOUGH].sum() / every.sum())
    ratio = float(every[min(_ENOUGH, len(every)) - 1] / every[0])
    return Judgement(
        "fashion-mnist/suffices",
        f"r = {_ENOUGH} directions suffice to capture the leading eigenspace of the first layer approximately.",
        to_verdict(share >= _CAPTURED) if judged else "cannot be judged",
        f"They have {share:.1%} of the sum of the {index[-1]} leading eigenvalues; λₖ/λ₁ at k = {_ENOUGH}: "
        f"{ratio:.1e}.",
        threshold=f"{_CAPTURED:.0%} of the sum",
    )
