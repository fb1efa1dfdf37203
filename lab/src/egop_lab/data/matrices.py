"""Matrices with orthonormal columns, and matrices with a given spectrum."""

import torch
from torch import Tensor


def random_orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw a matrix with orthonormal columns, uniform by Haar measure, in float64."""
    normal = torch.randn(rows, columns, generator=generator, dtype=torch.float64, device=generator.device)
    vectors, triangle = torch.linalg.qr(normal)
    return vectors * triangle.diagonal().sign()


def matrix_with_decay(rows: int, columns: int, decay: float, generator: torch.Generator) -> Tensor:
    """Draw a matrix with singular values k^-decay and random singular vectors, in float64."""
    rank = min(rows, columns)
    left, right = (random_orthonormal(size, rank, generator) for size in (rows, columns))
    values = torch.arange(1, rank + 1, dtype=torch.float64) ** -decay
    return left * values @ right.mT
