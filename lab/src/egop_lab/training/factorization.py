"""Random instances of low-rank matrix factorisation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from egop_lab.data.matrices import matrix_with_decay, random_orthonormal
from egop_lab.training import batched
from egop_lab.training.instances import Trials

# Power of the spectral estimate's singular values: in the usual spectral start, and as printed in the paper.
SPECTRAL, PRINTED = "Σ^½", "Σ^-½"
_POWERS = {SPECTRAL: 0.5, PRINTED: -0.5}

ROUNDING = 1e-16  # smallest recorded relative distance to the optimum


class Factorization(Trials):
    """½‖A L Rᵀ − Y‖², Y = A X* + noise: each trial has its own A, X* and noise, and starts at the spectral estimate.

    A is invertible, so the least loss is known: what the best rank-r approximation of Y leaves over.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        *,
        n: int,
        rank: int,
        condition: float,
        decay: float,
        noise: float,
        samples: int,
        start: str = SPECTRAL,
    ) -> None:
        sizes = {"n": n, "rank": rank, "condition": condition, "decay": decay, "noise": noise, "start": start}
        super().__init__(seeds, samples=samples, **sizes)
        self.rank = rank
        instances = [self._instance(torch.Generator().manual_seed(seed)) for seed in seeds]
        self.data, self.truth, self.targets = (torch.stack(column) for column in zip(*instances, strict=True))
        values = torch.linalg.svdvals(self.targets)
        self.least = 0.5 * values[:, rank:].square().sum(-1)

    def start(self) -> batched.Point:
        U, values, Vh = torch.linalg.svd(torch.linalg.pinv(self.data) @ self.targets)
        scale = values[:, None, : self.rank] ** _POWERS[self.sizes["start"]]
        return {"L": U[:, :, : self.rank] * scale, "R": Vh.mT[:, :, : self.rank] * scale}

    def losses(self, point: batched.Point, batch: Any) -> Tensor:
        product = self.data[:, None] @ (point["L"] @ point["R"].mT)
        return 0.5 * (product - self.targets[:, None]).square().sum((-2, -1))

    def evaluate(self, point: batched.Point) -> dict[str, Tensor]:
        excess = self.losses(point, 0) / self.least[:, None] - 1
        error = (point["L"] @ point["R"].mT - self.truth[:, None]).square().sum((-2, -1))
        return {"excess": excess.clamp(min=ROUNDING), "error": error}

    def _instance(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        n, rank = self.sizes["n"], self.rank
        data = matrix_with_decay(n, n, self.sizes["decay"], generator)
        left, right = (random_orthonormal(n, rank, generator) for _ in ("left", "right"))
        truth = left * torch.linspace(1, 1 / self.sizes["condition"], rank, dtype=torch.float64) @ right.mT
        noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
        return data, truth, data @ truth + self.sizes["noise"] * noise
