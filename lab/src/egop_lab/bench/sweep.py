"""The digits sweep: many runs as one tensor programme against one run at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import egop
from egop_lab.bench.machine import Row, Setting
from egop_lab.bench.setups import make_basis
from egop_lab.bench.timing import interleave, summary
from egop_lab.training import batched
from egop_lab.training.digits import STEPS_PER_EPOCH, DigitsProblem, network, train_single
from egop_lab.training.tuning import doublings

_TOGETHER, _PLAIN, _ALONE = "together", "one at a time", "one at a time, in the batched programme"


def run(setting: Setting) -> Iterator[Row]:
    """Run the sweep part of the benchmark: seconds per run and epoch of training, with one evaluation at the end."""
    rates = doublings(1e-3, 1)[: 2 if setting.smoke else None]
    trials = setting.pick(smoke=2, cpu=5, gpu=50)
    epochs = setting.pick(smoke=1, cpu=4, gpu=20)
    for coordinates in ("original", "EGOP"):
        turned = coordinates == "EGOP"
        turns = {
            _TOGETHER: _batched(range(trials), rates, epochs, turned, setting),
            _ALONE: _batched([0], rates[:1], epochs, turned, setting),
        }
        if not turned:
            turns[_PLAIN] = lambda: train_single(0, "Adam", rates[0], epochs, setting.device).seconds / epochs
        times, failed = interleave(turns, setting.turns(3))
        row: Row = {"coordinates": coordinates, "runs": trials * len(rates)}
        row |= summary(times, failed)
        singles = [row[name] for name in (_PLAIN, _ALONE) if name in row]
        if singles and _TOGETHER in row:
            row["speed-up"] = min(singles) / row[_TOGETHER]  # relative to the faster of the two single-run variants
        yield row


def _batched(
    seeds: Sequence[int], rates: Sequence[float], epochs: int, turned: bool, setting: Setting
) -> Callable[[], float]:
    problem = DigitsProblem(list(seeds), setting.device)
    basis = None
    if turned:
        same = make_basis(network(0).to(setting.device), egop.Full())  # any basis takes the same time
        basis = batched.Basis.stack([same] * len(seeds))

    def turn() -> float:
        steps = epochs * STEPS_PER_EPOCH
        _, seconds = batched.train(problem, "Adam", rates, steps, basis=basis, record_every=steps)
        return seconds / epochs / len(seeds) / len(rates)

    return turn
