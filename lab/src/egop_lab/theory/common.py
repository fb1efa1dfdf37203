"""Linear algebra that the theory functions share."""

import torch
from torch import Tensor


def symmetrize(matrix: Tensor) -> Tensor:
    """Return a symmetric matrix, or a stack of them, in float64 and without rounding errors in its symmetry."""
    double = matrix.detach().double()
    return (double + double.mT) / 2


def eigenbasis(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues (descending, clamped at zero) and eigenvectors of a positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.flip(-1).clamp_min(0), vectors.flip(-1)
