"""Kronecker: a basis for each side of a weight matrix, as in Shampoo and SOAP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.spectrum import Spectrum
from egop.basis.structures.accumulators import StackAccumulator, check_count, density, judge_reliability
from egop.basis.structures.base import Accumulator, ChangeOfBasis, Structure
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
from egop.numerics import OuterProducts


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

    @property
    def cost_per_step(self) -> int:
        return 4 * self.block.size * sum(matrix_shape(self.block))

    def rows(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        matrix = as_matrix(gradients, self.block)
        return {"left": matrix.mT, "right": matrix}

    def rotation_from(self, old: ChangeOfBasis) -> dict[str, Tensor]:
        return {side: self.tensors[side].mT @ old.tensors[side] for side in ("left", "right")}

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

    def accumulator(self, block: Block) -> Accumulator:
        return StackAccumulator(block, self) if any(block.stacked) else _KroneckerAccumulator(block)


class _KroneckerAccumulator(Accumulator):
    def __init__(self, block: Block) -> None:
        self.block = block
        self.left, self.right = (OuterProducts(size) for size in matrix_shape(block))

    def add(self, gradients: Sequence[Tensor]) -> None:
        matrices = as_matrix(gradients, self.block).detach().clone()
        self.left.add(matrices.mT.flatten(0, -2), len(matrices))
        self.right.add(matrices.flatten(0, -2), len(matrices))

    def merge(self, other: Self) -> None:
        self.left.merge(other.left)
        self.right.merge(other.right)

    def eigenbases(self) -> list[tuple[Tensor, Tensor]]:
        return [self.left.eigenbasis(), self.right.eigenbasis()]

    def finish(self) -> tuple[Spectrum, ChangeOfBasis]:
        """Return the spectrum of the Kronecker product, scaled to the mean squared gradient, and the bases."""
        draws = self.left.draws
        check_count(draws, self.block)
        (left_values, left), (right_values, right) = self.eigenbases()
        trace = left_values.sum() * self.left.count / draws  # the mean squared norm of a gradient
        scale = trace / (left_values.sum() * right_values.sum()).clamp_min(torch.finfo(torch.float64).tiny)
        values, order = (scale * torch.outer(left_values, right_values)).flatten().sort(descending=True, stable=True)
        densities = torch.outer(density(left), density(right)).flatten()[order]
        tensors = {"left": left.to(self.block.dtype), "right": right.to(self.block.dtype)}
        sides = [self.left.anisotropy(left_values), self.right.anisotropy(right_values)]
        return Spectrum(values, densities, draws, judge_reliability(sides)), KroneckerChange(self.block, tensors)
