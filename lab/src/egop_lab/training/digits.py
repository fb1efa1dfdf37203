"""Trials of the digits network."""

import math
from collections.abc import Sequence

import torch
from torch import nn

import egop
from egop_lab.data.batches import Batches
from egop_lab.data.digits import digits
from egop_lab.models.small import cross_entropy, digits_network, xavier_
from egop_lab.training.networks import ImageTrials

BATCH = 300
STEPS_PER_EPOCH = 13  # 3823 images in batches of 300, the last one smaller


class DigitsProblem(ImageTrials):
    """Trials of the 64-32-10 network."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        super().__init__(seeds, network, make_generator, digits().to(device), BATCH)
        self.device = device

    def bases(self) -> list[egop.Basis]:
        return [estimate(seed).to(self.device) for seed in self.seeds]


def network(seed: int) -> nn.Module:
    """Build the network at the start of a trial."""
    return xavier_(digits_network(), torch.Generator().manual_seed(seed))


def estimate(seed: int, share: float = 1.0) -> egop.Basis:
    """Estimate a trial's basis from d gradients at fresh initialisations, or from a share of d.

    This is done on the CPU, which is faster for this size.
    """
    model = network(seed)
    batches = Batches(*digits().train.batch, size=BATCH, generator=torch.Generator().manual_seed(2 * seed + 1))
    return egop.estimate(
        egop.Objective(model, cross_entropy, batches),
        rho=egop.Initialization(init_fn=xavier_),
        structure=egop.Full(),
        samples=math.ceil(share * sum(parameter.numel() for parameter in model.parameters())),
        generator=torch.Generator().manual_seed(seed),
        progress=False,
    )


def make_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the generator of a trial's order in an epoch."""
    return torch.Generator().manual_seed(seed * 100_003 + epoch)
