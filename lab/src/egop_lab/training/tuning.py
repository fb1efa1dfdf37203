"""Searches for a learning rate: the paper's in two stages, and one along a ladder of rates."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from egop_lab.training.records import Record

# First seed of tuning trials: no reported trial was used to choose a learning rate.
TUNING = 10_000

Evaluate = Callable[[Sequence[float]], Mapping[float, float]]
Score = Callable[[Mapping[str, Any]], float]  # of a result; the smaller the better


def powers_of_ten(lowest: int, highest: int) -> list[float]:
    """Return 10^lowest, ..., 10^highest."""
    return [float(f"1e{exponent}") for exponent in range(lowest, highest + 1)]


def doublings(lowest: float, highest: float) -> list[float]:
    """Divide each interval between powers of ten by doubling: 0.01, 0.02, 0.04, 0.08, 0.1, 0.2, ..., the end."""
    decades = powers_of_ten(round(math.log10(lowest)), round(math.log10(highest)))
    return [float(f"{factor * decade:.12g}") for decade in decades[:-1] for factor in (1, 2, 4, 8)] + decades[-1:]


def search_two_stage(evaluate: Evaluate, lowest: int, highest: int) -> tuple[float, dict[float, float]]:
    """Find the learning rate with the smallest score: powers of ten first, then doubling around the best one.

    ``evaluate`` gives a score for each of several learning rates at once (so that they can be run as one batch); the
    smaller the better, ``inf`` or ``nan`` for a run that diverged. It is called at most twice. The powers of ten have
    exponents from ``lowest`` to ``highest``.

    Returns:
        The best learning rate and the score of every one that was tried, ascending. Of equal scores the smaller rate.
    """
    scores = _score(evaluate, powers_of_ten(lowest, highest))
    best = _find_best(scores)
    if math.isfinite(scores[best]):
        around = doublings(max(best / 10, 10.0**lowest), min(best * 10, 10.0**highest))
        scores |= _score(evaluate, [rate for rate in around if rate not in scores])
    return _find_best(scores), dict(sorted(scores.items()))


def _score(evaluate: Evaluate, rates: Sequence[float]) -> dict[float, float]:
    if not rates:
        return {}
    scores = evaluate(rates)
    return {rate: float(scores[rate]) if math.isfinite(scores[rate]) else math.inf for rate in rates}


def _find_best(scores: Mapping[float, float]) -> float:
    return min(sorted(scores), key=lambda rate: scores[rate])


def best_rate(records: Iterable[Record], score: Score) -> float:
    """Return the learning rate with the smallest median score; the smaller one of a tie. nan is the worst score."""
    scores: dict[float, list[float]] = {}
    for record in records:
        value = score(record.result)
        scores.setdefault(record.config["lr"], []).append(math.inf if math.isnan(value) else value)
    return _find_best({rate: statistics.median(values) for rate, values in scores.items()})


def is_tuning(run: Record) -> bool:
    """Return True if a run is for choosing a learning rate."""
    return bool(run.config["seed"] >= TUNING)


def search_rates(
    ladder: Sequence[float], first: Sequence[float], runs: Sequence[Record], score: Score
) -> tuple[float, list[float]]:
    """Return the best learning rate, and the rates still to try before it is known.

    The ``first`` rates are always tried. While the best is the first or last rate tried, the next one of the ladder on
    that side is to be tried too.
    """
    there = {run.config["lr"] for run in runs}
    low, high = ladder.index(min(first)), ladder.index(max(first))
    while True:
        tried = ladder[low : high + 1]
        if left := [rate for rate in tried if rate not in there]:
            return math.nan, left
        best = ladder.index(best_rate([run for run in runs if run.config["lr"] in tried], score))
        if best == low > 0:
            low -= 1
        elif best == high < len(ladder) - 1:
            high += 1
        else:
            return ladder[best], []
