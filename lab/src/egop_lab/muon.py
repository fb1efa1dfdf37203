"""Muon and NorMuon with weights of one shape stacked: rivals as fast as they can be had.

torch's own Muon works weight by weight and takes no kernels; these do the same to a stack of weights in one call, and
see a kernel as a matrix with a row for each output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import egop

__all__ = ["Muon", "NorMuon"]


class Muon(egop.optim.MatrixOptimizer):
    """The momentum with all singular values made one, nearly; with updates of AdamW's size, as torch's own has them.

    Args:
        params: weights of two dimensions or more.
        lr: learning rate, of AdamW's size.
        momentum: decay of the running mean.
        nesterov: look a step ahead.
        weight_decay: decoupled.
        iterations: Newton-Schulz steps.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        iterations: int = 5,
        **further: Any,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, settings | {"iterations": iterations, "update_rms": 0.2} | further)

    recordable = True

    def transform(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Their polar factors."""
        return egop.optim.polar(matrices, group["iterations"])

    def compute_scales(self, updates: Tensor, group: Mapping[str, Any]) -> Tensor:
        """As if they were orthogonal to the last digit."""
        size = group["update_rms"] * math.sqrt(max(updates.shape[-2:]))
        dtype = torch.promote_types(updates.dtype, torch.float32)
        return updates.new_full((*updates.shape[:-2], 1, 1), size, dtype=dtype)


class NorMuon(Muon):
    """Muon with the rows of each update brought to one size, by a running mean of their squares (arXiv 2510.05491).

    Args:
        params: weights of two dimensions or more.
        lr: learning rate, of AdamW's size.
        momentum: decay of the running mean.
        beta2: decay of the running mean of squared rows.
        eps: added to its root.
        **options: as for :class:`Muon`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        *,
        beta2: float = 0.95,
        eps: float = 1e-8,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, momentum, beta2=beta2, eps=eps, **options)

    recordable = True

    def compute_updates(self, group: Mapping[str, Any], weights: list[Tensor], matrices: Tensor) -> Tensor:
        """Polar factors, each row divided by the root of its running mean square, then all scaled to one size."""
        factors = self.transform(matrices, group)
        lengths = torch.linalg.vector_norm(factors, dim=-1, keepdim=True, dtype=matrices.dtype)
        squares = lengths.square().div_(factors.shape[-1])
        means = [
            self.state[weight].setdefault("row_sq", torch.zeros_like(fresh))
            for weight, fresh in zip(weights, squares, strict=True)
        ]
        torch._foreach_lerp_(means, list(squares.unbind()), 1 - group["beta2"])
        return factors / (torch.stack(means).sqrt() + group["eps"])

    def compute_scales(self, updates: Tensor, group: Mapping[str, Any]) -> Tensor:
        """To one size."""
        return egop.optim.rms_scales(updates, group["update_rms"])
