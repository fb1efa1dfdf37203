"""Sweeps over learning rates, trials and coordinates, run in batches, with one record per run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from egop_lab.training import batched
from egop_lab.training.context import Context, make_record
from egop_lab.training.records import Store

P = TypeVar("P", bound=batched.Problem)

EGOP = "EGOP"
ORIGINAL = "original"

# First seed of tuning trials: no reported trial was used to choose a learning rate.
TUNING = 10_000


@dataclass(frozen=True)
class Sweep:
    """Runs to do: every optimizer in every kind of coordinates, with every rate, on every trial."""

    rates: Mapping[str, Sequence[float]]  # of each optimizer
    seeds: Sequence[int]  # one per trial
    coordinates: Sequence[str]  # "original", "EGOP" or another kind that the experiment knows
    steps: int
    record_every: int  # steps between two recorded evaluations
    at_once: int  # trials to run together, limited by memory
    extra: Mapping[str, Any]  # further settings that go into every configuration


def run_sweep(
    make_config: Callable[..., dict[str, Any]],
    sweep: Sweep,
    store: Store,
    context: Context,
    problem: Callable[[Sequence[int]], P],
    basis: Callable[[P, str], batched.Basis | None],
    schedule: Callable[[int], float] | None = None,
    compact: Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]] | None = None,
    **options: Any,
) -> None:
    """Do the runs that the store does not have yet; all rates and some trials of one method at a time.

    Args:
        make_config: builds the configuration of a run from the preset and its own settings.
        sweep: the runs to do.
        store: the finished runs.
        context: the preset and the device.
        problem: builds the problems of several seeds.
        basis: builds their bases for a kind of coordinates; called once for all optimizers.
        schedule: returns the factor of all learning rates after a number of periods.
        compact: returns what to record of a result, given the configuration; everything by default.
        **options: further arguments of the training.
    """

    def configs(optimizer: str, coordinates: str, rate: float) -> list[dict[str, Any]]:
        common = {"optimizer": optimizer, "coordinates": coordinates, "lr": rate, "steps": sweep.steps}
        return [make_config(context.preset, **common, **sweep.extra, seed=seed) for seed in seeds]

    for first in range(0, len(sweep.seeds), sweep.at_once):
        seeds = sweep.seeds[first : first + sweep.at_once]
        instance: P | None = None
        for coordinates in sweep.coordinates:
            turned: batched.Basis | None = None
            asked = False
            for optimizer, rates in sweep.rates.items():
                left = {rate: runs for rate in rates if store.missing(runs := configs(optimizer, coordinates, rate))}
                if not left:
                    continue
                instance = instance if instance is not None else problem(seeds)
                if not asked:
                    turned, asked = basis(instance, coordinates), True
                curves, seconds = batched.train(
                    instance,
                    optimizer,
                    list(left),
                    sweep.steps,
                    basis=turned,
                    schedule=schedule,
                    record_every=sweep.record_every,
                    progress=context.progress,
                    **options,
                )
                records = []
                for column, runs in enumerate(left.values()):
                    for row, config in enumerate(runs):
                        result = {name: values[row, column].tolist() for name, values in curves.items()}
                        result = result if compact is None else compact(config, result)
                        records.append(make_record(config, result, seconds / len(left) / len(seeds), context.device))
                store.add(*records)
