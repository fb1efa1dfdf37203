"""Gradient samples per second: one at a time and vmapped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch

import egop
from egop.estimation import sample_gradients
from egop_lab.bench import networks
from egop_lab.bench.machine import Row, Setting, release
from egop_lab.bench.networks import Network
from egop_lab.bench.timing import interleave, summary, time_call
from egop_lab.data.batches import Batches
from egop_lab.data.digits import digits
from egop_lab.models.small import xavier_

Method = Literal["loop", "vmap"]

_INITIALIZATION = egop.Initialization(init_fn=xavier_)


def run(setting: Setting) -> Iterator[Row]:
    """Run the sampling part of the benchmark."""
    cases: list[tuple[Network, egop.Distribution, int, int]] = setting.pick(
        smoke=[
            (networks.digits(8), _INITIALIZATION, 2, 4),
            (networks.convolutions(2, 2), egop.Gaussian(0.1), 2, 4),
            (networks.gpt(1, 16, 2, 8, half=False), egop.Gaussian(0.02), 2, 4),
        ],
        cpu=[
            (networks.digits(), _INITIALIZATION, 300, 1205),
            (networks.digits(), egop.Gaussian(0.1), 300, 1205),
            (networks.convolutions(32, 16), egop.Gaussian(0.1), 30, 60),
            (networks.gpt(2, 64, 8, 32, half=False), egop.Gaussian(0.02), 30, 60),
        ],
        gpu=[
            (networks.digits(), _INITIALIZATION, 200, 2410),
            (networks.digits(), egop.Gaussian(0.1), 200, 2410),
            (networks.convolutions(32, 16), egop.Gaussian(0.1), 100, 1000),
            (networks.gpt(2, 64, 8, 32, half=False), egop.Gaussian(0.02), 50, 500),
        ],
    )
    for network, rho, few, many in cases:
        yield _row(network, rho, few, many, setting)
        release(setting.device)


def _row(network: Network, rho: egop.Distribution, few: int, many: int, setting: Setting) -> Row:
    objective = egop.Objective(network.make(setting.device), network.loss, _batches(network, setting.device))
    counts: dict[Method, int] = {"loop": few, "vmap": many}
    turns: dict[str, Callable[..., float]] = {
        method: functools.partial(_per_second, objective, rho, count, method, setting.device)
        for method, count in counts.items()
    }
    for turn in turns.values():
        interleave({"warm-up": functools.partial(turn, samples=2)}, rounds=1)
    times, failed = interleave(turns, setting.turns(3))
    row: Row = {"network": network.name, "rho": type(rho).__name__, "batch": list(network.inputs), "samples": counts}
    row |= summary(times, failed)
    return row if failed else row | {"vmap over loop": row["vmap"] / row["loop"]}


def _batches(network: Network, device: torch.device) -> Iterable[Any]:
    """Return batches; for the digits network those of the experiment, in a new order on every pass."""
    if network.name != networks.digits().name:
        return network.batches(device, 13)
    images, labels = (tensor.to(device) for tensor in digits().train.batch)
    return Batches(images, labels, size=network.inputs[0], generator=torch.Generator().manual_seed(0))


def _per_second(
    objective: egop.Objective,
    rho: egop.Distribution,
    samples: int,
    method: Method,
    device: torch.device,
) -> float:
    def sample() -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in sample_gradients(objective, rho, samples, generator=generator, method=method):
            pass

    return samples / time_call(sample, device)
