"""Kronecker: a basis for each side of a weight matrix, as in Shampoo and SOAP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.structures.base import ChangeOfBasis, Structure
from egop.basis.structures.shared import DRAWS_WANTED, ROWS_WANTED
from egop.basis.structures.views import (
    Coordinates,
    as_matrix,
    as_tuple,
    check_matrix,
    from_matrix,
    matrix_shape,
    stack_shape,
)


class KroneckerChange(ChangeOfBasis):
    """``decode(C) = Q_L C Q_Rᵀ``."""

    kind = "Kronecker"

    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        return (self.tensors["left"].mT @ as_matrix(tensors, self.block) @ self.tensors["right"],)

    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        (matrix,) = as_tuple(coordinates)
        return from_matrix(self.tensors["left"] @ matrix @ self.tensors["right"].mT, self.block)

    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        return (torch.Size((*stack_shape(self.block), *matrix_shape(self.block))),)

    @classmethod
    def basis_shapes(cls, block: Block, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        stack, (rows, columns) = stack_shape(block), matrix_shape(block)
        return {"left": (*stack, rows, rows), "right": (*stack, columns, columns)}

    def structure(self) -> Structure:
        return Kronecker()

    def rows(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        matrix = as_matrix(gradients, self.block)
        return {"left": matrix.mT, "right": matrix}

    def rotate(self, coordinates: Coordinates, rotation: Mapping[str, Tensor]) -> Coordinates:
        return (rotation["left"] @ coordinates[0] @ rotation["right"].mT,)


@dataclass(frozen=True, kw_only=True)
class Kronecker(Structure):
    """One basis for each side of a weight: V = Q_L ⊗ Q_R, the eigenvectors of the means of G Gᵀ and Gᵀ G.

    Each expert of a stack has its own bases.

    Example:
        >>> loss = lambda weight: weight.square().sum()
        >>> objective = egop.Objective.from_function(loss, {"weight": torch.zeros(5, 2)})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), structure=egop.Kronecker(), progress=False)
        >>> {side: tuple(matrix.shape) for side, matrix in basis["weight"].tensors.items()}
        {'left': (5, 5), 'right': (2, 2)}
    """

    change_type = KroneckerChange
    joint = False

    def check(self, block: Block) -> None:
        check_matrix(block, "Kronecker()")

    def samples(self, block: Block) -> int:
        return max(DRAWS_WANTED, math.ceil(ROWS_WANTED / min(matrix_shape(block))))
