"""Sweeps over learning rates, trials and both coordinates, run in batches and kept as one record a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from egop.runs import Series
from egop_lab.experiments import batched
from egop_lab.experiments.base import Context, Experiment, Judged, Preset, finished, median, quartiles
from egop_lab.experiments.records import Record, Store

P = TypeVar("P", bound=batched.Problem)

EGOP = "EGOP"
ORIGINAL = "original"

# Seeds of tuning trials start here, so that no reported trial was used for choosing a learning rate.
TUNING = 10_000


@dataclass(frozen=True)
class Sweep:
    """What to run: every optimizer in every kind of coordinates, with every rate, on every trial.

    Attributes:
        rates: the learning rates of each optimizer.
        seeds: one a trial.
        coordinates: ``"original"``, ``"EGOP"`` or further kinds that the experiment knows.
        steps: of each run.
        record_every: steps between two recorded evaluations.
        at_once: how many trials are run together, by what fits into memory.
        extra: further settings that go into every configuration.
    """

    rates: Mapping[str, Sequence[float]]
    seeds: Sequence[int]
    coordinates: Sequence[str]
    steps: int
    record_every: int
    at_once: int
    extra: Mapping[str, Any]


def run_sweep(
    experiment: Experiment,
    sweep: Sweep,
    store: Store,
    context: Context,
    problem: Callable[[Sequence[int]], P],
    basis: Callable[[P, str], batched.Basis | None],
    schedule: Callable[[int], float] | None = None,
    compact: Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]] | None = None,
    **options: Any,
) -> None:
    """Do what the store does not have yet; all rates and some trials of one method at a time.

    Args:
        experiment: whose runs they are.
        sweep: what to run.
        store: where finished runs are.
        context: the preset and the device.
        problem: makes the problems of several seeds.
        basis: makes their bases, for one kind of coordinates; asked once for all optimizers.
        schedule: the factor of all learning rates after so many periods.
        compact: what to keep of a result, given the configuration; all of it by default.
        **options: further arguments of the training.
    """
    for first in range(0, len(sweep.seeds), sweep.at_once):
        seeds = sweep.seeds[first : first + sweep.at_once]
        made: P | None = None
        for coordinates in sweep.coordinates:
            turned: batched.Basis | None = None
            asked = False
            for optimizer, rates in sweep.rates.items():
                wanted = [_config(experiment, context.preset, sweep, optimizer, coordinates, r, seeds) for r in rates]
                left = [rate for rate, configs in zip(rates, wanted, strict=True) if store.missing(configs)]
                if not left:
                    continue
                made = made if made is not None else problem(seeds)
                if not asked:
                    turned, asked = basis(made, coordinates), True
                found, seconds = batched.train(
                    made,
                    optimizer,
                    left,
                    sweep.steps,
                    basis=turned,
                    schedule=schedule,
                    record_every=sweep.record_every,
                    progress=context.progress,
                    **options,
                )
                records = []
                for column, rate in enumerate(left):
                    configs = _config(experiment, context.preset, sweep, optimizer, coordinates, rate, seeds)
                    for row, config in enumerate(configs):
                        result = {name: values[row, column].tolist() for name, values in found.items()}
                        result = result if compact is None else compact(config, result)
                        records.append(finished(config, result, seconds / len(left) / len(seeds), context.device))
                store.add(*records)


def _config(
    experiment: Experiment,
    preset: Preset,
    sweep: Sweep,
    optimizer: str,
    coordinates: str,
    rate: float,
    seeds: Iterable[int],
) -> list[dict[str, Any]]:
    common = {"optimizer": optimizer, "coordinates": coordinates, "lr": rate, "steps": sweep.steps}
    return [experiment.config(preset, **common, **sweep.extra, seed=seed) for seed in seeds]


def by_rate(
    records: Iterable[Record], score: Callable[[Mapping[str, Any]], float]
) -> dict[float, tuple[float, float, float]]:
    """First quartile, median and third quartile of a score over trials, for each learning rate, ascending."""
    scores: dict[float, list[float]] = {}
    for record in records:
        scores.setdefault(record.config["lr"], []).append(score(record.result))
    found = {}
    for rate in sorted(scores):
        low, middle, high = quartiles([[value] for value in scores[rate]])
        found[rate] = (low[0], middle[0], high[0])
    return found


def best_rate(records: Iterable[Record], score: Callable[[Mapping[str, Any]], float]) -> float:
    """The learning rate with the smallest median score; of equal ones the smaller."""
    medians = {rate: middle for rate, (_, middle, _) in by_rate(records, score).items()}
    return min(medians, key=lambda rate: medians[rate])


def rate_series(
    records: Sequence[Record],
    score: Callable[[Mapping[str, Any]], float],
    optimizer: str,
    coordinates: str,
    chosen: float | None = None,
) -> Series:
    """A score over learning rates as a line with quartiles."""
    found = by_rate(records, score)
    columns = list(zip(*found.values(), strict=True))
    label = optimizer if coordinates == ORIGINAL else f"{optimizer}, {coordinates}"
    return Series(label, list(found), columns[1], columns[0], columns[2], optimizer, coordinates != ORIGINAL, chosen)


def curve_series(
    records: Sequence[Record], name: str, optimizer: str, coordinates: str, x: Sequence[float] | None = None
) -> Series:
    """A recorded curve over steps or epochs, median and quartiles over trials."""
    curves = [record.result[name] for record in records]
    low, middle, high = quartiles(curves)
    label = optimizer if coordinates == ORIGINAL else f"{optimizer}, {coordinates}"
    places = list(range(len(middle))) if x is None else list(x)
    return Series(label, places, middle, low, high, optimizer, coordinates != ORIGINAL)


def same_in_both(
    id: str, who: str, original: Sequence[Record], turned: Sequence[Record], name: str, tolerance: float
) -> Judged:
    """The check that an optimizer which knows no coordinates (SGD) has the same curve in both; an error otherwise.

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
    found = f"Largest median relative difference of a trial: {worst:.2g}."
    return Judged(id, f"Check: {who} is the same in both coordinates.", "holds", found, "check")
