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
from egop.basis.structures.accumulators import density
from egop.basis.structures.base import Accumulator, ChangeOfBasis, Structure, Summary
from egop.basis.structures.views import Coordinates, as_tuple, flatten, rows_times, unflatten
from egop.numerics import RowSketch

# Gradients are kept as they are up to this many bytes, then sketched.
_ROWS_BYTES = 512 * 2**20


class AuxiliaryChange(ChangeOfBasis):
    """``decode(a, b) = V a + (I − V Vᵀ) b``: coordinates in the leading directions, and original ones for the rest.

    There are more coordinates than entries. The synthesis S has S Sᵀ = I, so its adjoint is both the pull-back of
    gradients and the exact starting point (Vᵀx, x − V Vᵀx).
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

    @classmethod
    def basis_shapes(cls, block: Block, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"basis": (block.size, settings["rank"])}

    def structure(self) -> Structure:
        return Auxiliary(self.settings["rank"])

    @property
    def cost_per_step(self) -> int:
        return 8 * self.block.size * int(self.settings["rank"])


class ReducedChange(ChangeOfBasis):
    """``decode(a) = V a``: nothing outside the leading directions moves."""

    kind = "Reduced"
    complete = False

    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        return (rows_times(flatten(tensors, self.block), self.tensors["basis"]),)

    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        (leading,) = as_tuple(coordinates)
        return unflatten(rows_times(leading, self.tensors["basis"].mT), self.block)

    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        return (torch.Size([self.settings["rank"]]),)

    @classmethod
    def basis_shapes(cls, block: Block, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"basis": (block.size, settings["rank"])}

    def structure(self) -> Structure:
        return Reduced(self.settings["rank"], keep_rest=self.settings["keep_rest"])

    @property
    def cost_per_step(self) -> int:
        return 4 * self.block.size * int(self.settings["rank"])

    def round_trip_error(self) -> float:
        """Here coordinates come back, not every vector."""
        (shape,) = self.coordinate_shapes()
        unit = torch.full(shape, shape[0] ** -0.5, dtype=self.block.dtype, device=self.device)
        return float(torch.linalg.vector_norm(self.encode(self.decode(unit))[0] - unit))


@dataclass(frozen=True)
class _LowRank(Structure):
    rank: int
    power_iterations: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"Invalid rank value: {self.rank!r}. Must be a whole number of at least 1.")
        if self.power_iterations < 0:
            raise ValueError(f"Invalid power_iterations value: {self.power_iterations}. Must be zero or more.")

    def check(self, block: Block) -> None:
        if self.rank > block.size:
            raise ValueError(
                f"Invalid rank value: {self.rank}. Block '{block.name}' has only {block.size} entries; "
                f"use egop.Full() for it, or a structure={{...}} by block names."
            )

    def samples(self, block: Block) -> int:
        """The paper's hundredth of the dimension, but never fewer than the directions asked for."""
        return max(self.rank, math.ceil(0.01 * block.size))

    def settings(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def accumulator(self, block: Block) -> Accumulator:
        return _LowRankAccumulator(block, self)


@dataclass(frozen=True)
class Auxiliary(_LowRank):
    """The paper's auxiliary variables: the leading eigenvectors, and the original coordinates for the rest.

    Args:
        rank: how many eigenvectors.
        power_iterations: of the randomized SVD that finds them.
        seed: of its random start.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.zeros(50)})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), structure=egop.Auxiliary(4), progress=False)
        >>> [tuple(shape) for shape in basis["theta"].coordinate_shapes()]  # leading directions, and the rest
        [(4,), (50,)]
    """

    change_type = AuxiliaryChange


@dataclass(frozen=True)
class Reduced(_LowRank):
    """Only the span of the leading eigenvectors is trained. With SGD this is low-rank gradient descent.

    Args:
        rank: how many eigenvectors.
        power_iterations: of the randomized SVD that finds them.
        seed: of its random start.
        keep_rest: whether the part of the starting point outside the span stays. False drops it as soon as the
            optimizer is made, so that θ = V θ̃ as the paper writes it.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.zeros(50)})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), structure=egop.Reduced(4), progress=False)
        >>> [tuple(shape) for shape in basis["theta"].coordinate_shapes()]
        [(4,)]
    """

    change_type = ReducedChange
    keep_rest: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.keep_rest, bool):
            raise ValueError(f"Invalid keep_rest value: {self.keep_rest!r}. Must be True or False.")

    def settings(self) -> dict[str, Any]:
        return {"rank": self.rank, "keep_rest": self.keep_rest}


class _LowRankAccumulator(Accumulator):
    def __init__(self, block: Block, structure: _LowRank) -> None:
        self.block, self.structure = block, structure
        self.sketch = RowSketch(structure.rank, capacity=_ROWS_BYTES // (block.size * block.dtype.itemsize))

    def add(self, gradients: Sequence[Tensor]) -> None:
        self.sketch.add(flatten(gradients, self.block).detach().to(self.block.dtype, copy=True))

    def merge(self, other: Self) -> None:
        self.sketch.merge(other.sketch)

    def summaries(self) -> Sequence[Summary]:
        return [self.sketch]

    def finish(self) -> tuple[Spectrum, ChangeOfBasis]:
        if self.sketch.count == 0:
            raise ValueError(f"Block '{self.block.name}' has seen no gradients.")
        ((values, vectors),) = self.eigenbases()
        change = self.structure.change(self.block, {"basis": vectors})
        return Spectrum(values, density(vectors), self.sketch.count), change

    def eigenbases(self) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.structure.seed)
        return [self.sketch.leading(self.structure.power_iterations, generator)]
