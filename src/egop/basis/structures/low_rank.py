"""Auxiliary and Reduced: only the leading eigenvectors of a block, for weights too large for a dense basis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.spectrum import Spectrum
from egop.basis.structures.accumulators import Accumulator, density
from egop.basis.structures.base import ChangeOfBasis, Structure
from egop.basis.structures.views import Coordinates, as_tuple, flatten, rows_times, unflatten
from egop.numerics import RowSketch, check_positive_int

# Gradients are stored up to this many bytes, then sketched.
_ROWS_BYTES = 512 * 2**20
_POWER_ITERATIONS = 4  # of the randomized SVD


class _LowRankChange(ChangeOfBasis):
    @classmethod
    def basis_shapes(cls, block: Block, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"basis": (block.size, settings["rank"])}


class AuxiliaryChange(_LowRankChange):
    """``decode(a, b) = V a + (I − V Vᵀ) b``: coordinates in the leading directions, and original ones for the rest.

    There are more coordinates than entries. The synthesis S satisfies S Sᵀ = I, so its adjoint is both the pull-back
    of gradients and the exact starting point (Vᵀx, x − V Vᵀx).
    """

    kind = "Auxiliary"

    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        vector, basis = flatten(tensors, self.block), self.tensors["basis"]
        leading = rows_times(vector, basis)
        return leading, vector - rows_times(leading, basis.mT)

    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        leading, rest = as_tuple(coordinates)
        basis = self.tensors["basis"]
        return unflatten(rest + rows_times(leading - rows_times(rest, basis), basis.mT), self.block)

    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        return torch.Size([self.settings["rank"]]), torch.Size([self.block.size])

    def structure(self) -> Structure:
        return Auxiliary(rank=self.settings["rank"])

    @property
    def cost_per_step(self) -> int:
        return 2 * super().cost_per_step


class ReducedChange(_LowRankChange):
    """``decode(a) = V a``: nothing outside the leading directions moves."""

    kind = "Reduced"
    is_complete = False

    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        return (rows_times(flatten(tensors, self.block), self.tensors["basis"]),)

    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        (leading,) = as_tuple(coordinates)
        return unflatten(rows_times(leading, self.tensors["basis"].mT), self.block)

    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        return (torch.Size([self.settings["rank"]]),)

    def structure(self) -> Structure:
        return Reduced(rank=self.settings["rank"], keep_rest=self.settings["keep_rest"])


@dataclass(frozen=True, kw_only=True)
class _LowRank(Structure):
    rank: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive_int("rank", self.rank)

    def check(self, block: Block) -> None:
        if self.rank > block.size:
            raise ValueError(
                f"Invalid rank value: {self.rank}. Block '{block.name}' has only {block.size} entries; "
                f"use egop.Full() for it, or a structure={{...}} by block names."
            )

    def samples(self, block: Block) -> int:
        """Return 1 % of the dimension, as in the paper, but at least the rank."""
        return max(self.rank, math.ceil(0.01 * block.size))

    def settings(self, block: Block) -> dict[str, Any]:
        return {"rank": self.rank}

    def accumulator(self, block: Block) -> Accumulator:
        return _LowRankAccumulator(block, self)


@dataclass(frozen=True, kw_only=True)
class Auxiliary(_LowRank):
    """The paper's auxiliary variables: the leading eigenvectors, and the original coordinates for the rest.

    Args:
        rank: the number of eigenvectors.
        seed: seed for the random start of the SVD.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.zeros(50)})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), structure=egop.Auxiliary(rank=4), progress=False)
        >>> [tuple(shape) for shape in basis["theta"].coordinate_shapes()]  # leading directions, and the rest
        [(4,), (50,)]
    """

    change_type = AuxiliaryChange


@dataclass(frozen=True, kw_only=True)
class Reduced(_LowRank):
    """The span of the leading eigenvectors; nothing outside it is trained. With SGD this is low-rank gradient descent.

    Args:
        rank: the number of eigenvectors.
        seed: seed for the random start of the SVD.
        keep_rest: keep the part of the starting point outside the span. If False, creating the optimizer drops it, so
            that θ = V θ̃ as in the paper.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.zeros(50)})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), structure=egop.Reduced(rank=4), progress=False)
        >>> [tuple(shape) for shape in basis["theta"].coordinate_shapes()]
        [(4,)]
    """

    change_type = ReducedChange
    keep_rest: bool = True

    def settings(self, block: Block) -> dict[str, Any]:
        return {"rank": self.rank, "keep_rest": self.keep_rest}


class _LowRankAccumulator(Accumulator):
    def __init__(self, block: Block, structure: _LowRank) -> None:
        self.block, self.structure = block, structure
        self.sketch = RowSketch(structure.rank, capacity=_ROWS_BYTES // (block.size * block.dtype.itemsize))

    def add(self, gradients: Sequence[Tensor]) -> None:
        self.sketch.add(flatten(gradients, self.block).detach().to(self.block.dtype, copy=True))

    def merge(self, other: Self) -> None:
        self.sketch.merge(other.sketch)

    def finish(self) -> tuple[Spectrum, ChangeOfBasis]:
        generator = torch.Generator().manual_seed(self.structure.seed)
        values, vectors = self.sketch.leading(_POWER_ITERATIONS, generator)
        change = self.structure.change(self.block, {"basis": vectors})
        return Spectrum(values, density(vectors), self.sketch.count), change
