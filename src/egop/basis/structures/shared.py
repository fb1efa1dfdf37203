"""Shared: one basis over the inputs, shared by all rows or kernels of a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.structures.accumulators import EigenAccumulator, StackAccumulator
from egop.basis.structures.base import Accumulator, ChangeOfBasis, Structure
from egop.basis.structures.views import (
    Coordinates,
    as_matrix,
    as_tuple,
    check_matrix,
    from_matrix,
    matrix_shape,
    stack_shape,
)
from egop.numerics import OuterProducts

# How many rows or kernels the paper's rule asks for in every layer.
ROWS_WANTED = 1000


class SharedChange(ChangeOfBasis):
    """``decode(C) = C Vᵀ``: every row of the weight (kernel, embedded token) rotated by the same V."""

    kind = "Shared"
    rowwise = True

    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        return (as_matrix(tensors, self.block) @ self.tensors["basis"],)

    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        (matrix,) = as_tuple(coordinates)
        return from_matrix(matrix @ self.tensors["basis"].mT, self.block)

    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        return (torch.Size((*stack_shape(self.block), *matrix_shape(self.block))),)

    @classmethod
    def basis_shapes(cls, block: Block, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        columns = matrix_shape(block)[1]
        return {"basis": (*stack_shape(block), columns, columns)}

    def structure(self) -> Structure:
        return Shared()

    @property
    def cost_per_step(self) -> int:
        return 4 * self.block.size * matrix_shape(self.block)[1]

    def rows(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return {"basis": as_matrix(gradients, self.block)}

    def rotation_from(self, old: ChangeOfBasis) -> dict[str, Tensor]:
        return {"basis": self.tensors["basis"].mT @ old.tensors["basis"]}

    def rotated(self, coordinates: Coordinates, rotation: Mapping[str, Tensor]) -> Coordinates:
        return (coordinates[0] @ rotation["basis"].mT,)


@dataclass(frozen=True, kw_only=True)
class Shared(Structure):
    """One basis for all rows of a weight: (I ⊗ V), V of the size of one row or kernel; one for each of many experts.

    Every row's gradient is a sample, so few passes are enough: as many as give every layer 1000 of them.

    Example:
        >>> inputs = torch.tensor([[1.0, 1.0], [2.0, 2.0]])  # vary along (1, 1)
        >>> loss = lambda weight: (inputs @ weight.mT).square().mean()
        >>> objective = egop.Objective.from_function(loss, {"weight": torch.zeros(5, 2)})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), structure=egop.Shared(), progress=False)
        >>> basis["weight"].tensors["basis"].abs()[:, 0]
        tensor([0.7071, 0.7071])
    """

    change_type = SharedChange
    joint = False

    def check(self, block: Block) -> None:
        check_matrix(block, "Shared()")

    def samples(self, block: Block) -> int:
        return math.ceil(ROWS_WANTED / matrix_shape(block)[0])

    def accumulator(self, block: Block) -> Accumulator:
        if any(block.stacked):
            return StackAccumulator(block, self)
        return EigenAccumulator(block, self.change, _rows, OuterProducts(matrix_shape(block)[1]))


def _rows(gradients: Sequence[Tensor], block: Block) -> Tensor:
    return as_matrix(gradients, block).flatten(0, -2)
