"""Full: the dense eigenbasis of a block, as in the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.structures.base import ChangeOfBasis, Structure
from egop.basis.structures.views import Coordinates, as_tuple, flatten, rows_times, unflatten


class FullChange(ChangeOfBasis):
    """``decode(c) = V c`` over all entries of the block as one vector."""

    kind = "Full"

    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        return (rows_times(flatten(tensors, self.block), self.tensors["basis"]),)

    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        (vector,) = as_tuple(coordinates)
        return unflatten(rows_times(vector, self.tensors["basis"].mT), self.block)

    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        return (torch.Size([self.block.size]),)

    @classmethod
    def basis_shapes(cls, block: Block, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"basis": (block.size, block.size)}

    def structure(self) -> Structure:
        return Full()

    def rows(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return {"basis": flatten(gradients, self.block).unsqueeze(-2)}

    def rotate(self, coordinates: Coordinates, rotation: Mapping[str, Tensor]) -> Coordinates:
        return (rows_times(coordinates[0], rotation["basis"].mT),)


@dataclass(frozen=True, kw_only=True)
class Full(Structure):
    """One dense eigenbasis for the whole block.

    Example:
        >>> loss = lambda theta: theta.sum().square()  # gradients have one direction only, (1, 1, 1)
        >>> objective = egop.Objective.from_function(loss, {"theta": torch.zeros(3)})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), structure=egop.Full(), progress=False)
        >>> [round(abs(entry), 3) for entry in basis["theta"].dense()[:, 0].tolist()]
        [0.577, 0.577, 0.577]
    """

    change_type = FullChange

    def samples(self, block: Block) -> int:
        return block.size
