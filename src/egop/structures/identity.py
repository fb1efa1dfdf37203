"""Identity: the original coordinates, through the same machinery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from egop.partition import Block
from egop.structures.base import Accumulator, ChangeOfBasis, Coordinates, Cost, Structure, as_tuple, flatten


class IdentityChange(ChangeOfBasis):
    """Coordinates equal to the tensors."""

    kind = "Identity"

    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        flatten(tensors, self.block)  # checks the shapes
        return as_tuple(tensors)

    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        return as_tuple(coordinates)

    @property
    def cost_per_step(self) -> int:
        return 0

    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        return self.block.shapes


@dataclass(frozen=True, kw_only=True)
class Identity(Structure):
    """Leave the block in its original coordinates."""

    def samples(self, block: Block) -> int:
        return 0

    def cost(self, block: Block) -> Cost:
        return Cost(bytes=0, flops=0)

    def accumulator(self, block: Block) -> Accumulator:
        return _Nothing(block)


class _Nothing(Accumulator):
    def __init__(self, block: Block) -> None:
        self.block = block

    def add(self, gradients: Sequence[Tensor]) -> None:
        pass

    def merge(self, other: Self) -> None:
        pass

    def finish(self) -> tuple[None, ChangeOfBasis]:
        return None, IdentityChange(self.block, {})
