"""Identity: the original coordinates, through the same interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.structures.accumulators import Accumulator, NoAccumulator
from egop.basis.structures.base import ChangeOfBasis, Structure
from egop.basis.structures.views import (
    Coordinates,
    as_matrix,
    as_tuple,
    flatten,
    from_matrix,
    matrix_shape,
    stack_shape,
)


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
        return NoAccumulator(self.change(block, {}))
