"""Sinkhorn: rows and columns of the momentum, normalised in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egop.numerics import check_fraction, check_positive_int, noise_floor, scale_near_one
from egop.optim.matrices import MatrixOptimizer


class Sinkhorn(MatrixOptimizer):
    """The momentum with rows and columns of one length each, normalised in turn.

    In coordinates that serve it (``refresh=egop.Aligned()``) this is ARO (arXiv 2602.09006).

    Args:
        params: weights of two dimensions or more, or groups of them.
        lr: learning rate, of AdamW's size.
        momentum: decay of the running mean of the gradients.
        nesterov: look a step ahead.
        iterations: how often rows and columns are normalised.
        weight_decay: decoupled, as AdamW's.
        update_rms: the root mean square of an update before the learning rate.

    Example:
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> optimizer = egop.optim.Sinkhorn(model.parameters(), lr=1e-2)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
    """

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
        check_fraction("momentum", momentum)
        check_positive_int("iterations", iterations)
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "iterations": iterations}
        super().__init__(params, settings | {"weight_decay": weight_decay, "update_rms": update_rms})

    recordable = True

    def mapped(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """With rows of length √columns, then columns of length √rows, and so on."""
        return balanced(matrices, group["iterations"])


def balanced(matrices: Tensor, iterations: int) -> Tensor:
    """Rows normalised to length √columns, columns to √rows, in turn.

    Rows and columns of zeros stay so, and of what is zero but for rounding: a momentum of lower rank has such rows in
    good coordinates, and its noise is not to be blown up.

    Only the scales of rows and columns are found by iteration: one product by squares a pass, and one by the matrix.
    """
    rows, columns = matrices.shape[-2:]
    matrices = scale_near_one(matrices)
    squares = matrices.square()
    by_column = matrices.new_ones(*matrices.shape[:-2], columns, 1)
    for _ in range(iterations):
        by_row = _inverse(squares @ by_column, columns)
        by_column = _inverse(squares.mT @ by_row, rows)
    return matrices * by_row.sqrt() * by_column.mT.sqrt()


def _inverse(lengths: Tensor, wanted: int) -> Tensor:
    """Return the factors that give squared lengths their wanted value; zero for those that are mere rounding."""
    limit = noise_floor(lengths.dtype) ** 2 * lengths.amax(-2, keepdim=True)
    return torch.where(lengths > limit, wanted / lengths, 0)
