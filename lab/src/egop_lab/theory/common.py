"""Argument checks and the eigendecomposition that the theory functions share."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_positive(**values: float) -> None:
    """Raise ValueError for the first value that is not a positive finite number."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"Invalid {name} value: {value}. Must be a positive number.")


def check_nonnegative(**values: float) -> None:
    """Raise ValueError for the first value that is negative or not finite."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"Invalid {name} value: {value}. Must be zero or a positive number.")


def symmetrize(matrix: Tensor, name: str) -> Tensor:
    """Return a symmetric matrix, or a stack of them, in float64 and without rounding errors in its symmetry."""
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.numel() == 0:
        raise ValueError(f"Invalid {name} value: shape {tuple(matrix.shape)}. Must be a square matrix.")
    double = matrix.detach().double()
    if not torch.isfinite(double).all():
        raise ValueError(f"Invalid {name} value: it has entries that are not finite.")
    if (double - double.mT).abs().max() > 1e-6 * double.abs().max():
        raise ValueError(f"Invalid {name} value: it is not symmetric. Use ({name} + {name}.mT) / 2 if that is meant.")
    return (double + double.mT) / 2


def eigenbasis(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues (descending, clamped at zero) and eigenvectors of a positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.flip(-1).clamp_min(0), vectors.flip(-1)
