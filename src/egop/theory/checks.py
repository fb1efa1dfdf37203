"""What the functions of this package accept."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def positive(**values: float) -> None:
    """Raise an error that names the first value that is not a positive number."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"Invalid {name} value: {value}. Must be a positive number.")


def not_negative(**values: float) -> None:
    """Raise an error that names the first value that is negative or not a number."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"Invalid {name} value: {value}. Must be zero or a positive number.")


def symmetric(matrix: Tensor, name: str) -> Tensor:
    """A symmetric matrix, or a stack of them, in float64 and exactly symmetric."""
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.numel() == 0:
        raise ValueError(f"Invalid {name} value: shape {tuple(matrix.shape)}. Must be a square matrix.")
    double = matrix.detach().double()
    if not torch.isfinite(double).all():
        raise ValueError(f"Invalid {name} value: it has entries that are not finite.")
    if (double - double.mT).abs().max() > 1e-6 * double.abs().max():
        raise ValueError(f"Invalid {name} value: it is not symmetric. Use ({name} + {name}.mT) / 2 if that is meant.")
    return (double + double.mT) / 2
