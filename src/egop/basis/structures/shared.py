"""Shared: one basis for one side of a weight, shared by all of its rows (or columns)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.structures.base import ChangeOfBasis, Structure
from egop.basis.structures.views import (
    Coordinates,
    as_matrix,
    as_tuple,
    check_matrix,
    from_matrix,
    matrix_shape,
    multiply,
    stack_shape,
)

Side = Literal["input", "output", "smaller"]

# The paper asks for this many rows or kernels in every layer. The rows of one gradient may be nearly the same, so there
# is also a minimum number of gradients, as many as the lab's prediction study draws.
ROWS_WANTED = 1000
DRAWS_WANTED = 64


class SharedChange(ChangeOfBasis):
    """``decode(C) = C Vᵀ``: every row of the weight (kernel, embedded token) rotated by the same V.

    On the output side ``decode(C) = V C``: every column rotated by the same V.
    """

    kind = "Shared"

    def __init__(self, block: Block, tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(block, tensors, settings)
        self.is_rowwise = not _is_output(self.settings)

    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        matrix, basis = as_matrix(tensors, self.block), self.tensors["basis"]
        return (multiply(matrix, basis) if self.is_rowwise else multiply(basis.mT, matrix),)

    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        (matrix,), basis = as_tuple(coordinates), self.tensors["basis"]
        return from_matrix(multiply(matrix, basis.mT) if self.is_rowwise else multiply(basis, matrix), self.block)

    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        return (torch.Size((*stack_shape(self.block), *matrix_shape(self.block))),)

    @classmethod
    def basis_shapes(cls, block: Block, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        width = matrix_shape(block)[0 if _is_output(settings) else 1]
        return {"basis": (*stack_shape(block), width, width)}

    def structure(self) -> Structure:
        return Shared(side="input" if self.is_rowwise else "output")

    def rows(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        matrix = as_matrix(gradients, self.block)
        return {"basis": matrix if self.is_rowwise else matrix.mT}

    def rotate(self, coordinates: Coordinates, rotation: Mapping[str, Tensor]) -> Coordinates:
        matrix, basis = coordinates[0], rotation["basis"]
        return (matrix @ basis.mT if self.is_rowwise else basis @ matrix,)


@dataclass(frozen=True, kw_only=True)
class Shared(Structure):
    """One basis for all rows of a weight: I ⊗ V, where V has the size of one row or kernel.

    Each expert of a stack has its own basis.

    Every row of a gradient contributes to the basis, so few draws are needed: by default, 1000 rows, or 64 draws.
    If the rows of a gradient are nearly the same, this is too few, and :func:`egop.estimate` warns.

    Args:
        side: the side of a weight that is rotated. ``"input"``, as in the paper: each row (all inputs of one output, a
            kernel). ``"output"``: each column. ``"smaller"``: the narrower one, which can be far cheaper: for a
            convolution the outputs instead of inputs times kernel. FSDP2 shards weights by outputs, so the input side
            is rotated locally, and the output side needs the whole weight gathered in every step.

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

    side: Side = "input"

    def __post_init__(self) -> None:
        if self.side not in get_args(Side):
            raise ValueError(f"Invalid side value: {self.side!r}. Must be 'input', 'output' or 'smaller'.")

    def check(self, block: Block) -> None:
        check_matrix(block, "Shared()")

    def samples(self, block: Block) -> int:
        rows, columns = matrix_shape(block)
        return max(DRAWS_WANTED, math.ceil(ROWS_WANTED / (columns if _is_output(self.settings(block)) else rows)))

    def settings(self, block: Block) -> dict[str, Any]:
        rows, columns = matrix_shape(block)
        is_output = self.side == "output" or (self.side == "smaller" and rows < columns)
        return {"side": "output"} if is_output else {}


def _is_output(settings: Mapping[str, Any]) -> bool:
    return settings.get("side") == "output"
