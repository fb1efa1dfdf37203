"""Synthetic data: features of a given spectrum, and tables."""

import torch
from torch import Tensor


def rotation(size: int, generator: torch.Generator) -> Tensor:
    """Draw a random orthogonal matrix."""
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0]


def features(count: int, size: int, generator: torch.Generator, *, decay: float, dense: bool) -> Tensor:
    """Draw Gaussian features whose deviations fall as k^-decay: along the axes, or along random directions."""
    scales = torch.arange(1, size + 1) ** -decay
    drawn = torch.randn(count, size, generator=generator) * scales
    return drawn @ rotation(size, generator) if dense else drawn


def friedman(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw Friedman's first function of ten uniform features, of which five matter; standardised, with some noise."""
    x = torch.rand(count, 10, generator=generator)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = (y - 14.4) / 4.9 + 0.05 * torch.randn(count, generator=generator)
    return (x - 0.5) * 12**0.5, y[:, None]
