"""Runs of the Fashion-MNIST network together: AdamW works by coordinates, so they are one tensor programme."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egop_lab.experiments import batched, stacked_network
from egop_lab.experiments.fashion_runs import BATCH, Runs, generator

Curves = dict[str, list[float]]


class FashionProblem(batched.Problem):
    """Trials of the network, each with its own start and its own order of the batches: those of :class:`Runs`."""

    def __init__(self, runs: Runs, seeds: Sequence[int]) -> None:
        self.runs, self.seeds = runs, list(seeds)
        self.steps_per_epoch = math.ceil(len(runs.train_set[1]) / BATCH)
        self._generators: list[torch.Generator] = []
        self._order = torch.empty(0)

    def start(self) -> batched.Point:
        networks = [dict(self.runs.start(seed).named_parameters()) for seed in self.seeds]
        return {name: torch.stack([each[name].detach() for each in networks]) for name in networks[0]}

    def batch(self, step: int) -> Tensor:
        """The rows of a step's batch; steps are asked for one after the other, from the first."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        images, labels = self.runs.train_set
        if batch == 0:
            if epoch == 0:
                self._generators = [generator(seed, 1) for seed in self.seeds]
            orders = [torch.randperm(len(labels), generator=source) for source in self._generators]
            self._order = torch.stack(orders).to(images.device)
        return self._order[:, batch * BATCH : (batch + 1) * BATCH]

    def losses(self, point: batched.Point, batch: Tensor) -> Tensor:
        images, labels = self.runs.train_set
        return stacked_network.cross_entropy(point, images[batch], labels[batch])

    def evaluate(self, point: batched.Point) -> dict[str, Tensor]:
        return stacked_network.evaluate(point, self.runs.train_set, self.runs.validation, self.runs.test)


def train_together(runs: Runs, configs: Sequence[Mapping[str, Any]]) -> tuple[list[Curves], float]:
    """Curves of several runs of one method: every seed among them with every pair of rate and weight decay.

    Returns:
        Curves by epoch in the order of the configurations, and the seconds of all of them together.
    """
    seeds = sorted({config["seed"] for config in configs})
    pairs = sorted({(config["lr"], config["weight_decay"]) for config in configs})
    ((rank, reduced, epochs),) = {(c["rank"], c.get("reduced", False), c["epochs"]) for c in configs}
    problem = FashionProblem(runs, seeds)
    basis = batched.Basis.stack([runs.basis(rank, seed, reduced)[0] for seed in seeds]) if rank else None
    found, seconds = batched.train(
        problem,
        "AdamW",
        [rate for rate, _ in pairs],
        epochs * problem.steps_per_epoch,
        weight_decays=[decay for _, decay in pairs],
        basis=basis,
        record_every=problem.steps_per_epoch,
        progress=runs.context.progress,
    )
    places = [(seeds.index(c["seed"]), pairs.index((c["lr"], c["weight_decay"]))) for c in configs]
    return [_until_divergence({name: values[place].tolist() for name, values in found.items()}) for place in places], (
        seconds
    )


def _until_divergence(curves: Curves) -> Curves:
    """A single run ends with the first loss that is not finite."""
    end = next((place + 1 for place, loss in enumerate(curves["loss"]) if not math.isfinite(loss)), None)
    return {
        name: values if end is None else values[:end] + [math.nan] * (len(values) - end)
        for name, values in curves.items()
    }
