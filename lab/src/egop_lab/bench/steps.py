"""Optimizer steps and whole training steps, compared with AdamW, SOAP and a lower bound."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

import egop
from egop_lab.bench import networks
from egop_lab.bench.machine import Rates, Row, Setting, release
from egop_lab.bench.networks import Network
from egop_lab.bench.setups import ADAMW, INSTALL, SOAP, find_available, make_setup, period
from egop_lab.bench.timing import Marks, interleave, spread
from egop_lab.builders import REFRESH_EVERY
from egop_lab.methods import COMPILED, Method, get_methods

_BATCHES = 4  # Gram matrices average several gradients, as in training


@dataclass(frozen=True)
class Turn:
    """Seconds in one round of a method: the mean step, the longest step, and the mean training step."""

    step: float
    longest: float
    whole: float | None = None


class Trial:
    """A method that trains its own network."""

    def __init__(
        self,
        network: Network,
        name: str,
        method: Method,
        model: nn.Module,
        batches: Sequence[networks.Batch],
        gradients: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        self.network, self.name, self.period, self.batches = network, name, period(method), batches
        self.gradients = [[gradient.clone() for gradient in group] for group in gradients]  # some methods modify them
        self.model = copy.deepcopy(model)
        self.device = batches[0][0].device
        self.optimizer = method.make(make_setup(self.model, network))
        self._parameters = list(self.model.parameters())

    def warm_up(self, *, whole: bool) -> Trial:
        """Run the first steps, which set things up and build a first basis; on a GPU a refresh also loads kernels."""
        if self.gradients:
            self.time_steps(self.period + 2 if self.device.type == "cuda" else 2)
        if whole:
            self.time_training_steps(2)
        return self

    def time_steps(self, steps: int) -> Turn:
        """Time steps for given gradients."""
        marks = Marks(self.device)
        for index in range(steps):
            for parameter, gradient in zip(self._parameters, self.gradients[index % len(self.gradients)], strict=True):
                parameter.grad = gradient
            marks.mark()
            self.optimizer.step()
            marks.mark()
        times = marks.seconds()[::2]
        return Turn(sum(times) / steps, max(times))

    def time_training_steps(self, steps: int) -> Turn:
        """Time training steps: forward, backward and step."""
        marks = Marks(self.device)
        for index in range(steps):
            marks.mark()
            self.model.zero_grad()
            self.network.loss(self.model, self.batches[index % len(self.batches)]).backward()
            marks.mark()
            self.optimizer.step()
        marks.mark()
        seconds = marks.seconds()
        times = seconds[1::2]
        return Turn(sum(times) / steps, max(times), sum(seconds) / steps)

    def turn(self, steps: int) -> Turn:
        """Run one round. On the CPU a training step is the sum of its parts; on a GPU they overlap."""
        steps = -(-steps // self.period) * self.period  # whole periods, each with one refresh
        if self.device.type != "cuda":
            return self.time_training_steps(steps)
        alone = self.time_steps(steps)
        return Turn(alone.step, alone.longest, self.time_training_steps(steps).whole)


def compute_gradients(network: Network, model: nn.Module, batches: Sequence[networks.Batch]) -> list[list[Tensor]]:
    """Compute the gradients of each batch."""
    parameters = list(model.parameters())
    return [list(torch.autograd.grad(network.loss(model, batch), parameters)) for batch in batches]


def trials(
    network: Network, methods: Mapping[str, Method], device: torch.device, *, whole: bool
) -> tuple[dict[str, Trial], dict[str, str]]:
    """Set up all methods for a network; return also why some could not be."""
    model = network.make(device)
    batches = network.batches(device, _BATCHES)
    gradients = [] if whole and device.type == "cpu" else compute_gradients(network, model, batches)

    def ready(name: str) -> Trial:
        return Trial(network, name, methods[name], model, batches, gradients).warm_up(whole=whole)

    results, failed = interleave({name: functools.partial(ready, name) for name in methods}, rounds=1)
    return {name: trial for name, (trial,) in results.items()}, failed


def measure(network: Network, methods: Mapping[str, Method], setting: Setting, steps: int, rounds: int) -> list[Row]:
    """Return the rows of one network: seconds of each method, and ratios to AdamW, SOAP and the lower bound."""
    ready, unready = trials(network, methods, setting.device, whole=True)
    results, failed = interleave(
        {name: functools.partial(trial.turn, steps) for name, trial in ready.items()},
        setting.turns(rounds),
        limit=setting.pick(smoke=1.0, cpu=15.0, gpu=6.0),
    )
    rows = [_row(ready[name], turns, setting.rates) for name, turns in results.items()]
    by_name = {row["method"]: row for row in rows}
    for row in rows:
        _compare(row, by_name)
    problems = (unready | failed).items()
    return rows + [{"network": network.name, "method": name, "failed": problem} for name, problem in problems]


def _row(trial: Trial, turns: Sequence[Turn], rates: Rates) -> Row:
    whole = [turn.whole for turn in turns if turn.whole is not None]
    row: Row = {
        "network": trial.network.name,
        "batch": list(trial.network.inputs),
        "parameters": sum(parameter.numel() for parameter in trial.model.parameters()),
        "method": trial.name,
        "renewed every": trial.period if trial.period > 1 else None,
        "step": median([turn.step for turn in turns]),
        "step spread": spread(turn.step for turn in turns),
        "longest step": median([turn.longest for turn in turns]),
        "whole": median(whole),
        "whole spread": spread(whole),
    }
    if isinstance(trial.optimizer, egop.ReparameterizedOptimizer):
        row |= floor(trial.optimizer.basis, rates)
    return row


def floor(basis: egop.Basis, rates: Rates) -> Row:
    """Return the least time for the products of one encode and one decode of every block."""
    needs = [(change.cost_per_step, _bytes_moved(change)) for change in basis.values()]
    return {
        "basis flops": sum(flops for flops, _ in needs),
        "basis bytes moved": sum(size for _, size in needs),
        "basis bytes": sum(change.nbytes for change in basis.values()),
        "floor": sum(rates.seconds(flops, size) for flops, size in needs),
    }


def _bytes_moved(change: egop.ChangeOfBasis) -> int:
    """Return the memory traffic of encode and decode: each reads the basis and the block and writes the block."""
    reads = 4 if change.kind == "Auxiliary" else 2
    return reads * change.nbytes + 4 * change.block.size * change.block.dtype.itemsize


def _compare(row: Row, rows: Mapping[str, Row]) -> None:
    if ADAMW in rows:
        row["step over AdamW"] = row["step"] / rows[ADAMW]["step"]
        row["whole over AdamW"] = row["whole"] / rows[ADAMW]["whole"]
    if row.get("floor"):
        row["step over floor"] = row["step"] / row["floor"]
    if SOAP in rows:
        row["SOAP over step"] = rows[SOAP]["step"] / row["step"]


def run(setting: Setting) -> Iterator[Row]:
    """Run the step part of the benchmark."""
    cases = setting.pick(
        smoke=[
            (networks.perceptron((12, 16, 16, 4), 8), 1, 1),
            (networks.resnet(2, 32, width=4, depths=(1, 1)), 1, 1),
            (networks.gpt(1, 16, batch=2, context=8), 1, 1),
        ],
        cpu=[
            (networks.perceptron((784, 1024, 1024, 10), 256), REFRESH_EVERY, 3),
            (networks.resnet(16, 96, width=32), REFRESH_EVERY // 2, 2),
            (networks.gpt(6, 384, batch=2), REFRESH_EVERY // 2, 2),
        ],
        gpu=[  # many short rounds: the speed of the host changes from second to second
            (networks.perceptron((784, 1024, 1024, 10), 512), REFRESH_EVERY, 31),
            (networks.resnet(128, 112), REFRESH_EVERY, 15),
            (networks.gpt(6, 384, batch=64), REFRESH_EVERY, 31),
            (networks.gpt(12, 768, batch=32), REFRESH_EVERY, 9),
        ],
    )
    for network, steps, rounds in cases:
        methods, missing = find_available(network)
        if missing:
            yield {"network": network.name, "note": INSTALL}
        if setting.gpu and not setting.smoke and network.name == "GPT 6x384":
            methods |= get_methods(COMPILED)  # on one network only, since compiling takes long
        yield from measure(network, methods, setting, steps, rounds)
        release(setting.device)
