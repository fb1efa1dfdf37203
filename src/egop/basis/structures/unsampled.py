"""Identity and RandomRotation: structures that need no gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.structures.accumulators import Accumulator
from egop.basis.structures.base import ChangeOfBasis, Structure
from egop.basis.structures.full import Full
from egop.basis.structures.views import (
    Coordinates,
    as_matrix,
    as_tuple,
    flatten,
    from_matrix,
    matrix_shape,
    stack_shape,
)
from egop.numerics import random_orthonormal


class IdentityChange(ChangeOfBasis):
    """The identity. Kernels become matrices, so that matrix optimizers step them as in other bases."""

    kind = "Identity"
    is_rowwise = True

    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        if _is_kernel(self.block):
            return (as_matrix(tensors, self.block).contiguous(),)
        flatten(tensors, self.block)  # checks the shapes
        return tuple(tensor.contiguous() for tensor in as_tuple(tensors))  # as fused kernels require

    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        (first, *_) = tensors = as_tuple(coordinates)
        return from_matrix(first, self.block) if _is_kernel(self.block) else tensors

    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        if _is_kernel(self.block):
            return (torch.Size((*stack_shape(self.block), *matrix_shape(self.block))),)
        return self.block.shapes

    @classmethod
    def basis_shapes(cls, block: Block, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {}

    def structure(self) -> Structure:
        return Identity()


def _is_kernel(block: Block) -> bool:
    """Return True for one weight of more than two dimensions, such as a convolution's."""
    return len(block.shapes) == 1 and len(block.shapes[0]) - block.stacked[0] > 2


@dataclass(frozen=True, kw_only=True)
class Identity(Structure):
    """The structure that leaves a block in its original coordinates.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        >>> objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [torch.ones(8, 4)])
        >>> structure = {"0.*": egop.Shared(), "1.*": egop.Identity()}
        >>> basis = egop.estimate(objective, structure=structure, progress=False)
        >>> {name: change.kind for name, change in basis.items()}
        {'0.weight': 'Shared', '1.weight': 'Identity'}
    """

    change_type = IdentityChange

    def samples(self, block: Block) -> int:
        return 0

    def accumulator(self, block: Block) -> Accumulator:
        return _NoAccumulator(self.change(block, {}))


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
        return _NoAccumulator(self.change(block, tensors))


class _NoAccumulator(Accumulator):
    def __init__(self, change: ChangeOfBasis) -> None:
        self.change = change

    def add(self, gradients: Sequence[Tensor]) -> None:
        pass

    def merge(self, other: Self) -> None:
        pass

    def finish(self) -> tuple[None, ChangeOfBasis]:
        return None, self.change
