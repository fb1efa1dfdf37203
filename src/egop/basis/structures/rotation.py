"""RandomRotation: a random orthogonal basis, the control for any claim that a basis is good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.structures.accumulators import Accumulator, NoAccumulator
from egop.basis.structures.base import ChangeOfBasis, Structure
from egop.basis.structures.full import Full
from egop.numerics import random_orthonormal


@dataclass(frozen=True, kw_only=True)
class RandomRotation(Structure):
    """A uniformly distributed orthogonal basis. No gradients are sampled.

    Args:
        seed: the seed, which is combined with the name of each block.
        like: the structure to imitate, so that the control differs from the method in nothing else.

    Example:
        >>> objective = egop.Objective.from_function(lambda weight: weight.sum(), {"weight": torch.zeros(5, 2)})
        >>> control = egop.extras.RandomRotation(seed=1, like=egop.Shared())
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), structure=control, progress=False)
        >>> basis["weight"].kind
        'Shared'
    """

    seed: int = 0
    like: Structure = field(default_factory=Full)

    @property
    def joint(self) -> bool:  # type: ignore[override]
        """The ``joint`` attribute of the imitated structure."""
        return self.like.joint

    def check(self, block: Block) -> None:
        self.like.check(block)

    def samples(self, block: Block) -> int:
        return 0

    def change(self, block: Block, tensors: Mapping[str, Tensor]) -> ChangeOfBasis:
        return self.like.change(block, tensors)

    def basis_shapes(self, block: Block) -> dict[str, tuple[int, ...]]:
        return self.like.basis_shapes(block)

    def accumulator(self, block: Block) -> Accumulator:
        # The name makes blocks of one shape differ. (hash() would differ between processes.)
        seed = self.seed * 1_000_003 + sum(ord(c) * 131**i for i, c in enumerate(block.name)) % 2**31
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: random_orthonormal(shape[-2], shape[-1], generator, shape[:-2]).to(block.dtype)
            for name, shape in self.basis_shapes(block).items()
        }
        return NoAccumulator(self.change(block, tensors))
