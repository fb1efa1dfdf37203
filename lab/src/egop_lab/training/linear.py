"""Trials of the multilayer linear network, with the three kinds of EGOP bases."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import egop
from egop_lab.data.batches import Batches
from egop_lab.data.matrices import random_orthonormal
from egop_lab.models.small import linear_network, xavier_
from egop_lab.training import batched
from egop_lab.training.batched import EGOP, ORIGINAL
from egop_lab.training.networks import NetworkTrials

WIDTHS = (10, 50, 30, 10)  # the paper's appendix has 10-30-50-10; the number of parameters is the same
NAMES = tuple(f"{layer}.weight" for layer in range(len(WIDTHS) - 1))
BATCH = 500
BLOCK = "EGOP, block"
FIRST = "EGOP, first layer"


class LinearProblem(NetworkTrials):
    """Trials of ‖W₃W₂W₁A − Y‖²/n with Y = M*A, each with its own A, M*, start and order of the batches.

    Of the columns of A, the samples, half are to train and a fifth to validate.
    """

    def __init__(
        self, seeds: Sequence[int], samples: int, gradients: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(seeds, _build_network, _order, samples // 2, BATCH, dtype=dtype, device=device)
        self.samples, self.gradients = samples, gradients
        pairs = [_draw_data(seed, samples) for seed in self.seeds]
        inputs = torch.stack([a for a, _ in pairs])
        train, validation = inputs[:, : samples // 2], inputs[:, samples // 2 : samples * 7 // 10]
        self.train = train.to(**self._to)
        self.target = torch.stack([target for _, target in pairs]).to(**self._to)
        # ‖E A‖² = ‖E R‖² for any R with R Rᵀ = A Aᵀ: whole data sets at the price of one batch.
        self._roots = {
            name: _compute_root(a).to(**self._to) for name, a in (("loss", train), ("validation loss", validation))
        }
        self._bases: dict[str, list[egop.Basis]] = {}

    def losses(self, point: batched.Point, batch: Tensor) -> Tensor:
        inputs = self.train.gather(1, batch[..., None].expand(-1, -1, WIDTHS[0]))
        return (inputs[:, None] @ self._error(point).mT).square().sum((-2, -1)) / BATCH

    def evaluate(self, point: batched.Point) -> dict[str, Tensor]:
        error = self._error(point)
        return {name: (error @ root[:, None]).square().sum((-2, -1)) for name, root in self._roots.items()}

    def basis(self, kind: str) -> batched.Basis | None:
        """Return the stacked bases of a kind of coordinates; estimated on the CPU, faster for small networks."""
        if kind == ORIGINAL:
            return None
        partition = "global" if kind == EGOP else "parameter"
        if partition not in self._bases:
            settings = self.samples, self.gradients, self._to["dtype"], partition
            self._bases[partition] = [estimate(seed, *settings).to(self._to["device"]) for seed in self.seeds]
        stacked = batched.Basis.stack(self._bases[partition])
        return batched.Basis(stacked.blocks[:1]) if kind == FIRST else stacked

    def _error(self, point: batched.Point) -> Tensor:
        first, second, third = (point[name] for name in NAMES)
        return third @ (second @ first) - self.target[:, None]


def _build_network(seed: int) -> nn.Module:
    return xavier_(linear_network(*WIDTHS), _generator(seed, 0))


def estimate(seed: int, samples: int, gradients: int, dtype: torch.dtype, partition: Any) -> egop.Basis:
    """Estimate the basis of a trial."""
    inputs, target = (tensor.to(dtype) for tensor in _draw_data(seed, samples))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        (rows,) = batch
        return (model(rows) - rows @ target.mT).square().sum() / len(rows)

    batches = Batches(inputs[: samples // 2], size=BATCH, generator=_generator(seed, 2))
    return egop.estimate(
        egop.Objective(_build_network(seed).to(dtype), loss, batches),
        rho=egop.Initialization(init_fn=xavier_),
        partition=partition,
        structure=egop.Full(),
        samples=gradients,
        generator=_generator(seed, 3),
        progress=False,
    )


def _generator(seed: int, purpose: int) -> torch.Generator:
    """Return the random stream for the start (0), the data (1), the estimation (2, 3) or an epoch (from 4 on)."""
    return torch.Generator().manual_seed(100_003 * seed + purpose)


def _order(seed: int, epoch: int) -> torch.Generator:
    return _generator(seed, 4 + epoch)


def _draw_data(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    """Draw the rows of Aᵀ, whose singular values are k^-2, and M*."""
    generator = _generator(seed, 1)
    left = random_orthonormal(samples, WIDTHS[0], generator)
    right = random_orthonormal(WIDTHS[0], WIDTHS[0], generator)
    singular = torch.arange(1, WIDTHS[0] + 1, dtype=torch.float64) ** -2.0
    return left * singular @ right.mT, torch.randn(WIDTHS[-1], WIDTHS[0], generator=generator, dtype=torch.float64)


def _compute_root(inputs: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(inputs.mT @ inputs / inputs.shape[1])
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
