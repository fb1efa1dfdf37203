"""Sinkhorn: normalize the rows and columns of the momentum in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egop.numerics import noise_floor, scale_near_one
from egop.optim.matrix_optimizer import MatrixOptimizer


class Sinkhorn(MatrixOptimizer):
    """The momentum, scaled so that all rows have the same length and all columns have the same length.

    In a basis that is aligned with the momentum (``refresh=egop.Aligned()``), this is ARO (arXiv 2602.09006).

    Args:
        params: weights of two or more dimensions, or parameter groups of them.
        lr: learning rate, similar to AdamW's.
        momentum: decay of the running mean of the gradients.
        nesterov: use Nesterov momentum.
        iterations: number of times that rows and columns are normalized.
        weight_decay: decoupled weight decay, as in AdamW.
        update_rms: root mean square of an update before the learning rate.

    Example:
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> optimizer = egop.optim.Sinkhorn(model.parameters(), lr=1e-2)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
    """

    recordable = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        iterations: int = 5,
        weight_decay: float = 0.0,
        update_rms: float = 0.2,
    ) -> None:
        rates = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "iterations": iterations}
        super().__init__(params, rates | {"weight_decay": weight_decay, "update_rms": update_rms})

    def transform(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the matrices with normalized rows and columns."""
        return balance(matrices, group["iterations"])


def balance(matrices: Tensor, iterations: int) -> Tensor:
    """Normalize rows to length √columns and columns to length √rows, in turn.

    Rows and columns that are zero up to rounding become zero: a momentum of low rank has such rows in a good basis, and
    its rounding errors must not be amplified.

    Only the scales of rows and columns are iterated, at the cost of two matrix-vector products per iteration.
    """
    rows, columns = matrices.shape[-2:]
    matrices = scale_near_one(matrices)
    squares = matrices.square()
    column_scales = matrices.new_ones(*matrices.shape[:-2], columns, 1)
    for _ in range(iterations):
        row_scales = _squared_scales(squares @ column_scales, columns)
        column_scales = _squared_scales(squares.mT @ row_scales, rows)
    return matrices * row_scales.sqrt() * column_scales.mT.sqrt()


def _squared_scales(lengths: Tensor, wanted: int) -> Tensor:
    """Return the factors that give squared lengths the wanted value; 0 for lengths that are rounding errors."""
    limit = noise_floor(lengths.dtype) ** 2 * lengths.amax(-2, keepdim=True)
    return torch.where(lengths > limit, wanted / lengths, 0)
