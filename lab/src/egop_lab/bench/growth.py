"""How cost grows: twice the width, twice the depth, twice the samples."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from statistics import median

import egop
from egop_lab.bench import bases, networks
from egop_lab.bench.machine import Row, Setting, release
from egop_lab.bench.networks import Network
from egop_lab.bench.setups import ADAMW, KRONECKER, KRONECKER_ONLINE, SHARED, SHARED_ONLINE, SOAP, find_available
from egop_lab.bench.steps import trials
from egop_lab.bench.timing import describe_error, interleave
from egop_lab.builders import REFRESH_EVERY

_METHODS = (ADAMW, SHARED, SHARED_ONLINE, KRONECKER, KRONECKER_ONLINE, SOAP)


def run(setting: Setting) -> Iterator[Row]:
    """Run the growth part of the benchmark."""
    widths = setting.pick(smoke=(8, 16), cpu=(256, 512, 1024), gpu=(512, 1024, 2048))
    yield from _steps("width", {width: networks.perceptron((64, width, width, 10), 64) for width in widths}, setting)
    depths, width = setting.pick(smoke=((1, 2), 8), cpu=((2, 4, 8), 256), gpu=((2, 4, 8), 512))
    deeper = {depth: networks.perceptron((64, *[width] * (depth + 1), 10), 64) for depth in depths}
    yield from _steps("depth", deeper, setting)
    yield from _estimates(setting)


def _steps(what: str, sizes: dict[int, Network], setting: Setting) -> Iterator[Row]:
    """Time a step, and compare it with the step at half the size."""
    last: dict[str, float] = {}
    for size, network in sizes.items():
        methods = {name: method for name, method in find_available(network)[0].items() if name in _METHODS}
        ready, unready = trials(network, methods, setting.device, whole=False)
        turns = {name: functools.partial(trial.time_steps, REFRESH_EVERY) for name, trial in ready.items()}
        results, failed = interleave(turns, setting.turns(3), limit=setting.pick(smoke=1.0, cpu=5.0, gpu=3.0))
        now = {name: median([turn.step for turn in rounds]) for name, rounds in results.items()}
        for name, seconds in now.items():
            row: Row = {"what": what, "size": size, "of": name, "seconds": seconds}
            yield row | ({"growth": seconds / last[name]} if name in last else {})
        for name, problem in (unready | failed).items():
            yield {"what": what, "size": size, "of": name, "failed": problem}
        last = now
        del ready, turns
        release(setting.device)


def _estimates(setting: Setting) -> Iterator[Row]:
    """Time an estimate on the digits network, and compare it with the estimate from half the samples."""
    structures = {"Shared": egop.Shared(), "Full": egop.Full()}
    network = networks.perceptron((6, 4, 3), 4) if setting.smoke else networks.digits()
    for name, structure in structures.items():
        last = None
        for samples in setting.pick(smoke=(2, 4), cpu=(500, 1000, 2000), gpu=(1000, 2000, 4000)):
            row: Row = {"what": "samples", "size": samples, "of": f"estimate, {name}"}
            try:
                row["seconds"] = bases.estimate(network, structure, samples, setting.device)[1]["seconds"]
            except Exception as error:  # go on with the other rows
                yield row | {"failed": describe_error(error)}
                continue
            yield row | ({} if last is None else {"growth": row["seconds"] / last})
            last = row["seconds"]
