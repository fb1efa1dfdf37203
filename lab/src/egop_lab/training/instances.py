"""Random instances of small problems, and their bases."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

import egop
from egop_lab.training import batched
from egop_lab.training.batched import EGOP, ORIGINAL


class Trials(batched.Problem):
    """Independent random instances of a problem, one a seed, with a basis each.

    A basis is from ``samples`` gradients, at points drawn from N(0, I). The sizes are all arguments but the seeds.
    """

    def __init__(self, seeds: Sequence[int], *, samples: int, **sizes: Any) -> None:
        self.seeds, self.samples, self.sizes = list(seeds), samples, {**sizes, "samples": samples}

    def single_trial(self, seed: int) -> Self:
        return type(self)([seed], **self.sizes)

    def objective(self, seed: int) -> egop.Objective:
        """Return the loss of one trial as an objective of the library."""
        trial = self.single_trial(seed)

        def loss(**values: Tensor) -> Tensor:
            return trial.losses({name: value[None, None] for name, value in values.items()}, 0).sum()

        return egop.Objective.from_function(loss, {name: value[0] for name, value in trial.start().items()})

    def estimate(self, seed: int, structure: egop.Structure) -> egop.Basis:
        """Estimate the basis of one trial, one block per parameter."""
        return egop.estimate(
            self.objective(seed),
            rho=egop.Gaussian(),
            partition="parameter",
            structure=structure,
            samples=self.samples,
            generator=torch.Generator().manual_seed(seed),
            progress=False,
        )

    def basis(self, coordinates: str) -> batched.Basis | None:
        """Estimate a basis for each trial; return None for original coordinates."""
        if coordinates == ORIGINAL:
            return None
        structures = [egop.Full() if coordinates == EGOP else egop.extras.RandomRotation(seed=s) for s in self.seeds]
        return batched.Basis.stack([self.estimate(*each) for each in zip(self.seeds, structures, strict=True)])
