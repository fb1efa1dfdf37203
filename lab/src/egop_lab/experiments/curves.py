"""Statistics of records over trials and learning rates, and their lines and bars."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from egop_lab.experiments.base import Judgement
from egop_lab.plots.picture import Panel, Series
from egop_lab.training.batched import ORIGINAL
from egop_lab.training.records import Record


def quartiles(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """Return the quartiles over trials (first, median, third), entry by entry; non-finite values count as worst."""
    stacked = np.nan_to_num(np.asarray(curves, dtype=float), nan=np.inf, posinf=np.inf)
    low, high = np.quantile(stacked, (0.25, 0.75), axis=0, method="nearest")  # no interpolation between infinite values
    return low.tolist(), np.median(stacked, axis=0).tolist(), high.tolist()


def bar_panel(title: str, what: str, runs: Mapping[str, Sequence[Record]], number: Callable[[Record], float]) -> Panel:
    """Draw one bar per method for a number of each of its runs; infinite if the median is."""
    triples = [quartiles([[number(run)] for run in records]) for records in runs.values()]
    low, middle, high = ([triple[part][0] for triple in triples] for part in range(3))
    return Panel(title, "", what, [Series(what, list(runs), middle, low, high)], yscale="linear", kind="bar")


def median(values: Sequence[float]) -> float:
    """Return the median, with nan counted as the worst (largest) value."""
    return statistics.median([value if value == value else math.inf for value in values])


def first_below(curve: Sequence[float], target: float) -> int | None:
    """Return the first index at which a curve is at most the target, or None."""
    return next((index for index, value in enumerate(curve) if value <= target), None)


def quartiles_by_rate(
    records: Iterable[Record], score: Callable[[Mapping[str, Any]], float]
) -> dict[float, tuple[float, float, float]]:
    """Return the quartiles (first, median, third) of a score over trials for each learning rate, ascending."""
    scores: dict[float, list[float]] = {}
    for record in records:
        scores.setdefault(record.config["lr"], []).append(score(record.result))
    bands = {}
    for rate in sorted(scores):
        low, middle, high = quartiles([[value] for value in scores[rate]])
        bands[rate] = (low[0], middle[0], high[0])
    return bands


def rate_series(
    records: Sequence[Record],
    score: Callable[[Mapping[str, Any]], float],
    optimizer: str,
    coordinates: str,
    chosen: float | None = None,
) -> Series:
    """Return a score over learning rates as a line with quartiles."""
    bands = quartiles_by_rate(records, score)
    columns = list(zip(*bands.values(), strict=True))
    label = optimizer if coordinates == ORIGINAL else f"{optimizer}, {coordinates}"
    return Series(label, list(bands), columns[1], columns[0], columns[2], optimizer, coordinates != ORIGINAL, chosen)


def curve_series(
    records: Sequence[Record], name: str, optimizer: str, coordinates: str, x: Sequence[float] | None = None
) -> Series:
    """Return a recorded curve over steps or epochs, median and quartiles over trials."""
    curves = [record.result[name] for record in records]
    low, middle, high = quartiles(curves)
    label = optimizer if coordinates == ORIGINAL else f"{optimizer}, {coordinates}"
    places = list(range(len(middle))) if x is None else list(x)
    return Series(label, places, middle, low, high, optimizer, coordinates != ORIGINAL)


def check_same_in_both(
    id: str, who: str, original: Sequence[Record], turned: Sequence[Record], name: str, tolerance: float
) -> Judgement:
    """Check that an optimizer without preferred coordinates (SGD) has the same curve in both; raise otherwise.

    Training amplifies rounding, so the median over recorded points of the relative difference is compared.
    """
    pairs = {record.config["seed"]: record.result[name] for record in original}
    differences = [
        median([abs(a - b) / max(abs(a), 1e-300) for a, b in zip(pairs[r.config["seed"]], r.result[name], strict=True)])
        for r in turned
    ]
    worst = max(differences)
    if not worst <= tolerance:
        raise AssertionError(f"{id}: {who} differs between coordinates by {worst:.2g}: the implementation is wrong.")
    finding = f"Largest median relative difference of a trial: {worst:.2g}."
    return Judgement(id, f"Check: {who} is the same in both coordinate systems.", "holds", finding, "check")


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's rank correlation, with mean ranks for ties; nan if one of the two is constant."""
    first, second = _rank(x), _rank(y)
    return math.nan if 1 in (len(set(first)), len(set(second))) else statistics.correlation(first, second)


def _rank(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
