"""Trials of one network as a batched problem."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from egop_lab.models import stacked
from egop_lab.training import batched

Network = Callable[[int], nn.Module]
Source = Callable[[int, int], torch.Generator]


class NetworkTrials(batched.Problem):
    """Trials of a network, each with its own start and its own order of the examples, in batches of a size.

    ``source`` returns the generator of a seed's order in an epoch, and is called for one epoch after the other; ``to``
    are device and precision.
    """

    def __init__(
        self, seeds: Sequence[int], network: Network, source: Source, examples: int, size: int, **to: Any
    ) -> None:
        self.seeds, self.network, self.source = list(seeds), network, source
        self.steps_per_epoch = math.ceil(examples / size)
        self._examples, self._size, self._to = examples, size, to
        self._orders: dict[int, Tensor] = {}

    def start(self) -> batched.Point:
        networks = [dict(self.network(seed).named_parameters()) for seed in self.seeds]
        return {name: torch.stack([net[name].detach() for net in networks]).to(**self._to) for name in networks[0]}

    def batch(self, step: int) -> Tensor:
        epoch, batch = divmod(step, self.steps_per_epoch)
        if epoch not in self._orders:
            orders = [torch.randperm(self._examples, generator=self.source(seed, epoch)) for seed in self.seeds]
            self._orders = {epoch: torch.stack(orders).to(self._to["device"])}
        return self._orders[epoch][:, batch * self._size : (batch + 1) * self._size]


class ImageTrials(NetworkTrials):
    """Trials of a two-layer network on images and labels to train, to validate and to test with."""

    def __init__(
        self, seeds: Sequence[int], network: Network, source: Source, sets: Sequence[stacked.Split], size: int
    ) -> None:
        self.train, self.validation, self.test = sets
        super().__init__(seeds, network, source, len(self.train[1]), size, device=self.train[0].device)

    def losses(self, point: batched.Point, batch: Tensor) -> Tensor:
        return stacked.cross_entropy(point, self.train[0][batch], self.train[1][batch])

    def evaluate(self, point: batched.Point) -> dict[str, Tensor]:
        return stacked.evaluate(point, self.train, self.validation, self.test)
