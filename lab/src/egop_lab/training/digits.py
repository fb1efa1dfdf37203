"""Trials of the digits network: as one batch, and one by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

import egop
from egop.records import Curve
from egop.training import train
from egop_lab.data.batches import Batches
from egop_lab.data.digits import digits
from egop_lab.methods import torch_optimizer
from egop_lab.models import stacked as stacked_network
from egop_lab.models.perceptrons import accuracy, cross_entropy, digits_network, xavier_
from egop_lab.training import batched
from egop_lab.training.context import over_processes

_BATCH = 300
STEPS_PER_EPOCH = 13  # 3823 images in batches of 300, the last one smaller


class DigitsProblem(batched.Problem):
    """Trials of the 64-32-10 network: each has its own start and its own order of the batches.

    Args:
        seeds: one a trial.
        device: where the training is to run.
        workers: processes for the bases.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device, workers: int = 1) -> None:
        self.seeds, self.device, self.workers = list(seeds), device, workers
        data = digits()
        self.train, self.validation, self.test = (
            tuple(tensor.to(device) for tensor in split.batch) for split in (data.train, data.validation, data.test)
        )
        self._orders: dict[int, Tensor] = {}

    def start(self) -> batched.Point:
        networks = [dict(network(seed).named_parameters()) for seed in self.seeds]
        return {name: torch.stack([each[name].detach() for each in networks]).to(self.device) for name in networks[0]}

    def batch(self, step: int) -> Tensor:
        epoch, batch = divmod(step, STEPS_PER_EPOCH)
        return self._order(epoch)[:, batch * _BATCH : (batch + 1) * _BATCH]

    def losses(self, point: batched.Point, batch: Tensor) -> Tensor:
        return stacked_network.cross_entropy(point, self.train[0][batch], self.train[1][batch])

    def evaluate(self, point: batched.Point) -> dict[str, Tensor]:
        return stacked_network.evaluate(point, self.train, self.validation, self.test)

    def bases(self) -> list[egop.Reparameterization]:
        """One basis a trial."""
        return [basis.to(self.device) for basis in over_processes(estimate, self.seeds, self.workers)]

    def _order(self, epoch: int) -> Tensor:
        """The order of the images in an epoch, a row a trial."""
        if epoch not in self._orders:
            orders = [_order(seed, epoch, len(self.train[1])) for seed in self.seeds]
            self._orders = {epoch: torch.stack(orders).to(self.device)}
        return self._orders[epoch]


def network(seed: int) -> nn.Module:
    """The network at a trial's start."""
    return xavier_(digits_network(), torch.Generator().manual_seed(seed))


def estimate(seed: int) -> egop.Reparameterization:
    """A trial's basis: M = d gradients at fresh initialisations; on the CPU, faster for so small a network."""
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


def train_alone(
    seed: int,
    optimizer: str,
    rate: float,
    epochs: int,
    device: torch.device | str = "cpu",
    basis: egop.Reparameterization | None = None,
) -> Curve:
    """One run of the sweep by itself: the network, torch's optimizer or the library's, the training loop.

    It is the same run as in :class:`DigitsProblem`'s batch: what the batch is tested against, and what its speed is
    compared with.

    Args:
        seed: of the trial.
        optimizer: a name in :data:`~egop_lab.methods.TORCH`.
        rate: the learning rate.
        epochs: how many.
        device: where to train.
        basis: EGOP coordinates; original ones by default.
    """
    data = digits()
    train_set, validation, test = (
        tuple(tensor.to(device) for tensor in split.batch) for split in (data.train, data.validation, data.test)
    )
    model = network(seed).to(device)
    return train(
        model,
        torch_optimizer(optimizer, model, rate, basis),
        cross_entropy,
        _Epochs(train_set, seed),
        epochs,
        evaluate=lambda model: {
            "loss": cross_entropy(model, train_set),
            "validation accuracy": accuracy(model, validation),
            "test accuracy": accuracy(model, test),
        },
        progress=False,
    )


class _Epochs:
    """Each pass over it has the batches of a trial's next epoch."""

    def __init__(self, tensors: Sequence[Tensor], seed: int) -> None:
        self._tensors, self._seed, self._epoch = tensors, seed, 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = _order(self._seed, self._epoch, len(self._tensors[0])).to(self._tensors[0].device)
        self._epoch += 1
        return (tuple(tensor[rows] for tensor in self._tensors) for rows in order.split(_BATCH))


def _order(seed: int, epoch: int, images: int) -> Tensor:
    return torch.randperm(images, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
