"""Optimizer steps and whole training steps, compared with AdamW."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from egop_lab.bench import networks
from egop_lab.bench.machine import Row, Setting, release
from egop_lab.bench.networks import Network
from egop_lab.bench.setups import make_setup
from egop_lab.bench.timing import Marks, interleave, spread
from egop_lab.builders import REFRESH_EVERY
from egop_lab.methods import BENCH, Builder

_BATCHES = 4  # Gram matrices average several gradients, as in training


@dataclass(frozen=True)
class Turn:
    """Seconds in one round of a method: the mean step, the longest step, and the mean training step."""

    step: float
    longest: float
    whole: float


class Trial:
    """A method that trains its own network."""

    def __init__(
        self,
        network: Network,
        build: Builder,
        model: nn.Module,
        batches: Sequence[networks.Batch],
        gradients: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        self.network, self.batches = network, batches
        self.gradients = [[gradient.clone() for gradient in group] for group in gradients]  # some methods modify them
        self.model = copy.deepcopy(model)
        self.device = batches[0][0].device
        self.optimizer = build(make_setup(self.model))
        self._parameters = list(self.model.parameters())

    def warm_up(self) -> Trial:
        """Run the first steps, which set things up and build a first basis; on a GPU a refresh also loads kernels."""
        if self.gradients:
            self.time_steps(REFRESH_EVERY + 2)
        self.time_training_steps(2)
        return self

    def time_steps(self, steps: int) -> list[float]:
        """Time steps for given gradients."""
        marks = Marks(self.device)
        for index in range(steps):
            for parameter, gradient in zip(self._parameters, self.gradients[index % len(self.gradients)], strict=True):
                parameter.grad = gradient
            marks.mark()
            self.optimizer.step()
            marks.mark()
        return marks.seconds()[::2]

    def time_training_steps(self, steps: int) -> list[float]:
        """Time training steps; alternate the seconds of forward and backward pass with those of the step."""
        marks = Marks(self.device)
        for index in range(steps):
            marks.mark()
            self.model.zero_grad()
            self.network.loss(self.model, self.batches[index % len(self.batches)]).backward()
            marks.mark()
            self.optimizer.step()
        marks.mark()
        return marks.seconds()

    def turn(self, periods: int) -> Turn:
        """Run one round of whole refresh periods.

        On the CPU a training step is the sum of its parts. On a GPU they overlap, so that steps are timed alone too.
        """
        steps = periods * REFRESH_EVERY
        seconds = self.time_training_steps(steps)
        times = self.time_steps(steps) if self.device.type == "cuda" else seconds[1::2]
        return Turn(sum(times) / steps, max(times), sum(seconds) / steps)


def compute_gradients(network: Network, model: nn.Module, batches: Sequence[networks.Batch]) -> list[list[Tensor]]:
    """Compute the gradients of each batch."""
    parameters = list(model.parameters())
    return [list(torch.autograd.grad(network.loss(model, batch), parameters)) for batch in batches]


def measure(network: Network, methods: Mapping[str, Builder], setting: Setting, rounds: int) -> Iterator[Row]:
    """Yield the rows of one network: seconds of each method, and their ratios to AdamW's."""
    model, batches = network.make(setting.device), network.batches(setting.device, _BATCHES)
    gradients = compute_gradients(network, model, batches) if setting.device.type == "cuda" else []

    def make_trial(name: str) -> Trial:
        return Trial(network, methods[name], model, batches, gradients).warm_up()

    trials, unready = interleave({name: functools.partial(make_trial, name) for name in methods}, rounds=1)
    results, failed = interleave(
        {name: functools.partial(trial.turn, 1) for name, (trial,) in trials.items()},
        setting.turns(rounds),
        limit=setting.pick(smoke=1.0, cpu=15.0, gpu=6.0),
    )
    base = results.get("AdamW")
    for name, turns in results.items():
        row: Row = {"network": network.name, "batch": list(network.inputs), "method": name}
        row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        for key in ("step", "longest", "whole"):
            seconds = [getattr(turn, key) for turn in turns]
            row |= {key: median(seconds), f"{key} spread": spread(seconds)}
            if base is not None:
                row[f"{key} over AdamW"] = row[key] / median(getattr(turn, key) for turn in base)
        yield row
    for name, problem in (unready | failed).items():
        yield {"network": network.name, "method": name, "failed": problem}


def run(setting: Setting) -> Iterator[Row]:
    """Run the step part of the benchmark."""
    cases = setting.pick(
        smoke=[
            (networks.perceptron((12, 16, 16, 4), 8), 1),
            (networks.resnet(2, 32, width=4, depths=(1, 1)), 1),
            (networks.gpt(1, 16, batch=2, context=8), 1),
        ],
        cpu=[
            (networks.perceptron((784, 1024, 1024, 10), 256), 3),
            (networks.resnet(16, 96, width=32), 2),
            (networks.gpt(6, 384, batch=2), 2),
        ],
        gpu=[  # many short rounds: the speed of the host changes from second to second
            (networks.perceptron((784, 1024, 1024, 10), 512), 31),
            (networks.resnet(128, 112), 15),
            (networks.gpt(6, 384, batch=64), 31),
            (networks.gpt(12, 768, batch=32), 9),
        ],
    )
    for network, rounds in cases:
        yield from measure(network, BENCH, setting, rounds)
        release(setting.device)
