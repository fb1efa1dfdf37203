"""Trials of the digits network, batched and single."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

import egop
from egop_lab.builders import build_torch_optimizer
from egop_lab.data.batches import Batches
from egop_lab.data.digits import digits
from egop_lab.models.small import cross_entropy, digits_network, scores, xavier_
from egop_lab.training.context import map_in_processes
from egop_lab.training.loop import Curve, train
from egop_lab.training.networks import ImageTrials

_BATCH = 300
STEPS_PER_EPOCH = 13  # 3823 images in batches of 300, the last one smaller


class DigitsProblem(ImageTrials):
    """Trials of the 64-32-10 network."""

    def __init__(self, seeds: Sequence[int], device: torch.device, workers: int = 1) -> None:
        super().__init__(seeds, network, _make_generator, digits().to(device), _BATCH)
        self.device, self.workers = device, workers

    def bases(self) -> list[egop.Basis]:
        """Estimate one basis per trial."""
        return [basis.to(self.device) for basis in map_in_processes(estimate, self.seeds, self.workers)]


def network(seed: int) -> nn.Module:
    """Build the network at the start of a trial."""
    return xavier_(digits_network(), torch.Generator().manual_seed(seed))


def estimate(seed: int) -> egop.Basis:
    """Estimate a trial's basis from d gradients at fresh initialisations; on the CPU, which is faster for this size."""
    model = network(seed)
    batches = Batches(*digits().train.batch, size=_BATCH, generator=torch.Generator().manual_seed(2 * seed + 1))
    return egop.estimate(
        egop.Objective(model, cross_entropy, batches),
        rho=egop.Initialization(init_fn=xavier_),
        structure=egop.Full(),
        samples=sum(parameter.numel() for parameter in model.parameters()),
        generator=torch.Generator().manual_seed(seed),
        progress=False,
    )


def train_single(
    seed: int,
    optimizer: str,
    rate: float,
    epochs: int,
    device: torch.device | str = "cpu",
    basis: egop.Basis | None = None,
) -> Curve:
    """Train one run of the sweep with torch's optimizer or the library's.

    It is the same run as in :class:`DigitsProblem`'s batch: what the batch is tested against, and what its speed is
    compared with.
    """
    sets = digits().to(device)
    model = network(seed).to(device)
    return train(
        model,
        build_torch_optimizer(optimizer, model, rate, basis),
        cross_entropy,
        _Epochs(sets[0], seed),
        epochs,
        evaluate=lambda model: scores(model, *sets),
        progress=False,
    )


class _Epochs:
    """Batches of a trial; each pass is its next epoch."""

    def __init__(self, tensors: Sequence[Tensor], seed: int) -> None:
        self._tensors, self._seed, self._epoch = tensors, seed, 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = torch.randperm(len(self._tensors[0]), generator=_make_generator(self._seed, self._epoch))
        order = order.to(self._tensors[0].device)
        self._epoch += 1
        return (tuple(tensor[rows] for tensor in self._tensors) for rows in order.split(_BATCH))


def _make_generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 100_003 + epoch)
