"""RandomRotation: a random orthogonal basis, the control for every claim that a basis is a good one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.structures.base import Accumulator, ChangeOfBasis, Structure, Summary
from egop.basis.structures.full import Full
from egop.numerics import random_orthonormal


@dataclass(frozen=True)
class RandomRotation(Structure):
    """A basis drawn uniformly from all orthogonal ones; no gradients are sampled.

    Args:
        seed: each block draws from this and its own name.
        like: the structure that the random basis has, so that the control differs from the method in nothing else.

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
        """As the structure it is like."""
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
        return _Random(block, self)


class _Random(Accumulator):
    def __init__(self, block: Block, structure: RandomRotation) -> None:
        self.block, self.structure = block, structure

    def add(self, gradients: Sequence[Tensor]) -> None:
        pass

    def merge(self, other: Self) -> None:
        pass

    def summaries(self) -> Sequence[Summary]:
        return []

    def finish(self) -> tuple[None, ChangeOfBasis]:
        # The name goes in so that blocks of one shape get different rotations; hash() would differ between processes.
        seed = self.structure.seed * 1_000_003 + sum(ord(c) * 131**i for i, c in enumerate(self.block.name)) % 2**31
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: random_orthonormal(shape[-2], shape[-1], generator, shape[:-2]).to(self.block.dtype)
            for name, shape in self.structure.basis_shapes(self.block).items()
        }
        return None, self.structure.change(self.block, tensors)
