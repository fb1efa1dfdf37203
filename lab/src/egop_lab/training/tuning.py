"""The paper's two-stage search for a learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Evaluate = Callable[[Sequence[float]], Mapping[float, float]]


def powers_of_ten(lowest: int, highest: int) -> list[float]:
    """Return 10^lowest, ..., 10^highest."""
    return [float(f"1e{exponent}") for exponent in range(lowest, highest + 1)]


def doublings(lowest: float, highest: float) -> list[float]:
    """Divide each interval between powers of ten by doubling: 0.01, 0.02, 0.04, 0.08, 0.1, 0.2, ..., the end."""
    decades = powers_of_ten(round(math.log10(lowest)), round(math.log10(highest)))
    return [float(f"{factor * decade:.12g}") for decade in decades[:-1] for factor in (1, 2, 4, 8)] + decades[-1:]


def search_two_stage(evaluate: Evaluate, lowest: int, highest: int) -> tuple[float, dict[float, float]]:
    """Find the learning rate with the smallest score: powers of ten first, then doubling around the best one.

    Args:
        evaluate: gives a score for each of several learning rates at once (so that they can be run as one batch); the
            smaller the better, ``inf`` or ``nan`` for a run that diverged. It is called twice, never with a rate that
            it has already seen.
        lowest: exponent of the smallest power of ten.
        highest: exponent of the largest.

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
